"""What the tests of time limits share: limits, handlers that do not end, and what is recorded of them."""

from __future__ import annotations

import time
from datetime import timedelta

import django_delayq as dq
from django_delayq.models import Timeout

LIMIT = timedelta(milliseconds=300)
LIMITS = dq.Limits(run=LIMIT)
RETRY = dq.Retry([3600])
FAILED = ("pending", 1, "TimeLimitExceeded")
"""The state, the attempts and the error after a handler has been abandoned once."""


def compute() -> None:
    while True:
        pass


def sleep() -> None:
    while True:
        time.sleep(0.01)


def overrun(row: Timeout) -> tuple[str, int, str]:
    """Return the state, the attempts and the error of `row`."""
    row.refresh_from_db()
    return row.state, row.attempts, row.errors[-1]["error"] if row.errors else ""
