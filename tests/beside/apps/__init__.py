"""Run with the settings of `tests.beside.project`: see `tests/beside/test_apps.py`."""
