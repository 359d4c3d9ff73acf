"""Prune: rows that were settled long ago are deleted, a few at a time, so that no delete is ever a long one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.ledger.forgetting import delete_page
from django_delayq.ledger.search import Count, count
from django_delayq.models import Timeout

PAUSE_SECONDS: Final = 0.01
"""Between two pages: replicas and other writers get their turn."""


def count_old(using: str) -> Count:
    """How many rows `prune` would delete now, up to `search.MAX_COUNT`."""
    before = database_now(using) - get_settings().retention
    return count(Timeout.objects.using(using).filter(settled_at__lt=before, due_at__lt=before))


def prune(using: str, older_than: timedelta | None = None, between: Callable[[], object] = lambda: None) -> int:
    """No row is left whose settling and deadline are both older than `older_than`; returns how many were deleted.

    Both, because a row that was cancelled long before its deadline still closes its round until then: without it the
    object would be armed a second time. Default: `RETENTION`. Each page is a transaction of its own, so it may be
    stopped at any time. `between` is called between two of them.
    """
    before = database_now(using) - (get_settings().retention if older_than is None else older_than)
    deleted = 0
    start: datetime | None = None
    while True:
        count, start = delete_page(using, before, start)
        deleted += count
        if start is None:
            return deleted
        between()
        time.sleep(PAUSE_SECONDS)
