"""The example shop with the five policies of `timeouts.py`."""
