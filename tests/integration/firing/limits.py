"""What the tests of time limits share: limits, handlers that do not end, and what is recorded of them."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import django_delayq as dq
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.support.waiting import wait_until

LIMIT = timedelta(milliseconds=300)
LIMITS = dq.Limits(run=LIMIT)
RETRY = dq.Retry([3600])
FAILED = ("pending", 1, "TimeLimitExceeded")
"""The state, the attempts and the error after a handler has been abandoned once."""


SECONDS = 3 if sys.version_info < (3, 12) and sys.gettrace() else 1_000_000
"""Handlers run so long unless they are interrupted, which they are not under a tracer, such as coverage, of 3.11."""


def compute() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        pass


def sleep() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(0.01)


def overrun(row: Timeout) -> tuple[str, int, str]:
    """Return the state, the attempts and the error of `row`."""
    row.refresh_from_db()
    return row.state, row.attempts, row.errors[-1]["error"] if row.errors else ""


def threads_end() -> None:
    """Wait until no abandoned handler runs any more."""
    wait_until(lambda: firing_state.stuck_threads == 0, "the threads of abandoned handlers have ended")
