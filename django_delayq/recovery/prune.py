"""Delete rows that were settled long ago, a few at a time, so that no transaction is long."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.ledger.search import Count, count
from django_delayq.ledger.settling import delete_settled, prunable

PAUSE_SECONDS: Final = 0.01
"""Between two pages, for replicas and other writers."""


def count_old(using: str) -> Count:
    """Return how many rows `prune` would delete now, up to `search.MAX_COUNT`."""
    before = database_now(using) - get_settings().retention
    return count(prunable(using, before))


def prune(using: str, older_than: timedelta | None = None, between: Callable[[], object] = lambda: None) -> int:
    """Delete rows that were settled, and due, longer than `older_than` ago (default: `RETENTION`); return how many.

    A row that was cancelled or fired long before its first deadline closes its round until then: without the row the
    object would be armed again. Each page is a transaction of its own, and `between` is called between two of them.
    """
    before = database_now(using) - (get_settings().retention if older_than is None else older_than)
    deleted = 0
    start: datetime | None = None
    while True:
        count, start = delete_settled(using, before, start)
        deleted += count
        if start is None:
            return deleted
        between()
        time.sleep(PAUSE_SECONDS)
