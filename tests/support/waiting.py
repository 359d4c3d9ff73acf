"""Wait for a condition instead of for a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import redis

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.05
"""Seconds between two checks: a test that checks 100 times a second takes the core that it waits for."""


def wait_until(holds: Callable[[], object], what: str = "the condition holds", seconds: float = 60.0) -> None:
    """Return as soon as `holds()` is true; fail the test after `seconds`, with the states of the ledger.

    A lost connection to Redis means "not yet": servers that fail over close the connections of their clients.
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while not _is_true(holds):
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}; {_ledger()}"
        time.sleep(pause)
        pause = min(1.25 * pause, LONGEST_PAUSE)


def _is_true(holds: Callable[[], object]) -> bool:
    try:
        return bool(holds())
    except (redis.ConnectionError, redis.TimeoutError):
        return False


def _ledger() -> str:
    """Describe the ledger, if the test may use a database and it answers."""
    try:
        from django_delayq.models import Timeout

        return f"the ledger: {dict(Counter(Timeout.objects.values_list('state', flat=True)))}"
    except Exception as error:  # what the test waited for is the failure to report
        return f"the ledger cannot be read: {type(error).__name__}"


class Steady:
    """A monotonic clock that shows `seconds`."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds
