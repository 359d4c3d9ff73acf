"""The example shop: orders that cancel themselves, and the four other rules of `timeouts.py`."""
