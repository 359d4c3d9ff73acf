"""A project behind a real web server: see `tests/beside/test_servers.py`."""
