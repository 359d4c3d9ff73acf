"""What operators do to timeouts and to policies."""
