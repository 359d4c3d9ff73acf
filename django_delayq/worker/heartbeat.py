"""A worker says every few seconds that it lives, so that operators see how many do, and which of them hang."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from django.db import Error as DatabaseError

import django_delayq
from django_delayq.clock import database_now
from django_delayq.models import WorkerSeen
from django_delayq.worker.link import Link
from django_delayq.worker.periodic import Job

INTERVAL: Final = timedelta(seconds=5)
FORGOTTEN_AFTER: Final = timedelta(hours=1)
"""Rows of workers that were killed stay so long, to be missed, and are then deleted by the others."""


class Heartbeat:
    """The worker's row in the ledger. It is written by another thread than the main loop, to show when that one hangs.

    Args:
        using: the database.
        queues: which the worker serves; None: all.
        concurrency: its threads.
        link: whether it has Redis just now.
        passed_at: `time.monotonic()` of its last pass.
        held: how many timeouts are under way.
    """

    def __init__(
        self,
        using: str,
        *,
        queues: Sequence[str] | None,
        concurrency: int,
        link: Link,
        passed_at: Callable[[], float],
        held: Callable[[], int],
    ) -> None:
        self._using = using
        self._link = link
        self._passed_at = passed_at
        self._held = held
        self._row = WorkerSeen(
            id=uuid.uuid4().hex,
            host=socket.gethostname()[:100],
            pid=os.getpid(),
            queues=None if queues is None else list(queues),
            concurrency=concurrency,
            version=django_delayq.__version__,
        )
        self._has_begun = False

    def beat(self) -> None:
        """The worker's row says that it lives, and rows of workers long dead are gone. Raises the database's errors."""
        now = database_now(self._using)
        row = self._row
        if not self._has_begun:
            row.started_at, self._has_begun = now, True
        row.seen_at, row.passed_at = now, now - timedelta(seconds=time.monotonic() - self._passed_at())
        row.uses_redis, row.held = self._link.is_up, self._held()
        row.save(using=self._using)
        WorkerSeen.objects.using(self._using).filter(seen_at__lt=now - FORGOTTEN_AFTER).delete()

    def job(self) -> Job:
        """Return the job that beats, and deletes the row in the end."""
        return Job("heartbeat", self.beat, INTERVAL.total_seconds(), at_end=self._end)

    def _end(self) -> None:
        with contextlib.suppress(DatabaseError):  # the database is away: other workers delete the row in time
            WorkerSeen.objects.using(self._using).filter(pk=self._row.pk).delete()
