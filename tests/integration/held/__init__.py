"""Timeouts whose clock is stopped."""
