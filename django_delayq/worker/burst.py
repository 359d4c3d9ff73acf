"""`--burst`: whether there is anything left to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policies import get_policies

PATIENCE_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.05


class Burst:
    """Nothing is left when no row is due whose policy is declared here and not stopped.

    What is due but cannot be fired now, because others hold its object or fire it themselves, is waited for as long
    as there is any progress, and some seconds more.
    """

    def __init__(self, using: str, queues: Sequence[str] | None) -> None:
        self._using = using
        self._queues = queues
        self._progress_at = time.monotonic()
        self._worked_on = 0

    def is_over(self, worked_on: int) -> bool:
        """Whether to end, by a worker that holds nothing and was given nothing. Raises the database's errors."""
        now = time.monotonic()
        if worked_on != self._worked_on:
            self._worked_on, self._progress_at = worked_on, now
        if now - self._progress_at > PATIENCE_SECONDS:
            return True
        labels = [label for policy in get_policies() for label in policy.labels]
        stopped = stop_cache.confirmed(self._using).all_labels()
        rows = Timeout.objects.using(self._using).due().of_labels(set(labels) - set(stopped))
        if self._queues is not None:
            rows = rows.filter(queue__in=self._queues)
        return not rows.exists()
