"""The sweep, the sync and the pruning of one worker, and what operators began."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from django_delayq import clock
from django_delayq.arming.sync import sync_all
from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.exceptions import EngineError, EngineFull
from django_delayq.ledger.controls import Stopped, read_stopped, resumed_since
from django_delayq.ledger.db_connections import check_connections
from django_delayq.operations.replan import ABANDONED_AFTER, continue_moves, requeue_due
from django_delayq.policies import registry
from django_delayq.recovery.clocks import Clocks
from django_delayq.recovery.prune import prune
from django_delayq.recovery.sweep import Sweep, settle_all_expired
from django_delayq.recovery.turns import turn
from django_delayq.worker.link import Link
from django_delayq.worker.periodic import Job
from django_delayq.worker.queues import forgotten_queues

PRUNE_INTERVAL: Final = timedelta(hours=1)
QUEUES_SECONDS: Final = 30.0
LOOK_BACK: Final = timedelta(seconds=10)
Between: TypeAlias = Callable[[], object]
"""What a long job calls between two pages."""


class Background:
    """What a worker does beside firing. Each method may be called by one thread at a time.

    Args:
        link: told when Redis fails here, and when it is back.
        using: the database.
        clocks: learns the database's moments.
        serve: called with queues that only rows name, whenever there are some; None: nobody wants to know.
        wake: called when the worker has a reason to look.
    """

    def __init__(
        self,
        link: Link,
        using: str,
        clocks: Clocks,
        *,
        serve: Callable[[Sequence[str]], None] | None,
        known_queues: Sequence[str],
        wake: Callable[[], None],
    ) -> None:
        self._link = link
        self._using = using
        self._sweep = None if link.engine is None else Sweep(link.engine, using, clocks)
        self._serve = serve
        self._known_queues = set(known_queues)
        self._wake = wake
        self._queues_at = 0.0
        self._stopped: Stopped = {}
        self._followed_at = clock.now()

    def quick_jobs(self, between: Between) -> list[Job]:
        """Return the job that touches only the library's own tables and Redis. It calls `between` between two pages."""
        return [Job("sweep", lambda: self.sweep(between), self._sweep_pause)]

    def slow_jobs(self, between: Between) -> list[Job]:
        """Return the jobs that read or lock the tables of the project, where a migration may lock them out for long.

        They call `between` between two pages.
        """
        settings = get_settings()
        return [
            Job("moves", self.continue_moves, settings.sweep_interval.total_seconds()),
            Job("sync", lambda: self.sync(between), settings.sync_interval.total_seconds()),
            Job("prune", lambda: self.prune(between), PRUNE_INTERVAL.total_seconds()),
        ]

    def sweep(self, between: Between = check_connections) -> None:
        """One sweep if it is our turn; if Redis was away, a look whether it is back, and then a sweep of everything.

        Raises the database's errors.
        """
        settle_all_expired(self._using)
        self._find_queues()
        self._follow_operators()
        if self._sweep is None:
            return
        try:
            if not self._link.is_up:
                self._come_back(self._sweep, between)
                return
            self._sweep.run_once(between=between)
        except EngineError as error:
            self._link.failed(error)
        else:
            self._link.took_all()

    def _come_back(self, sweep: Sweep, between: Between) -> None:
        self._link.probe(self._known_queues)
        try:
            sweep.run_once(everything=True, between=between)
        except EngineFull as error:
            self._link.failed(error)
        self._link.back()
        self._wake()

    def sweep_everything(self) -> None:
        """One sweep of everything, for a worker that does not wait for its turn. Raises EngineError too."""
        settle_all_expired(self._using)
        self._find_queues()
        if self._sweep is not None:
            self._sweep.run_once(everything=True)

    def sync(self, between: Between = check_connections) -> None:
        """Make the ledger fit the table of every automatic policy, if it is our turn. Raises the database's errors."""
        self._in_turn("sync", get_settings().sync_interval, lambda: sync_all(self._using, progress=lambda _: between()))

    def prune(self, between: Between = check_connections) -> None:
        """Delete rows that were settled long ago, if it is our turn. Raises the database's errors."""
        self._in_turn("prune", PRUNE_INTERVAL, lambda: prune(self._using, between=between))

    def continue_moves(self) -> None:
        """Carry on the changes of policies whose process died. Raises the database's errors."""
        continue_moves(self._using, left_alone=ABANDONED_AFTER)

    def _in_turn(self, name: str, interval: timedelta, work: Callable[[], object]) -> None:
        try:
            with turn(self._link.engine if self._link.is_up else None, name, interval) as is_ours:
                if is_ours:
                    work()
                return
        except EngineError as error:
            self._link.failed(error)
        work()

    def _sweep_pause(self) -> float:
        interval = get_settings().sweep_interval.total_seconds()
        is_away = self._link.engine is not None and not self._link.is_up
        return min(interval, self._link.pause_seconds) if is_away else interval

    def _follow_operators(self) -> None:
        """Bring back the timeouts of policies that were resumed, by an operator or by the end of their pause."""
        before, self._stopped = self._stopped, read_stopped(self._using)
        # Who was about to put something aside while it was resumed does so afterwards, and a change is seen at its
        # commit and not at its moment: hence both, and a look back.
        last, self._followed_at = self._followed_at, database_now(self._using)
        resumed = resumed_since(last - LOOK_BACK, self._using)
        for label in (before.keys() - self._stopped.keys()) | resumed:
            if policy := registry.get(label):
                requeue_due(policy, self._using)
                self._wake()

    def _find_queues(self) -> None:
        if self._serve is None or time.monotonic() < self._queues_at:
            return
        found = forgotten_queues(self._using, self._known_queues)
        self._queues_at = time.monotonic() + QUEUES_SECONDS
        if found:
            self._known_queues.update(found)
            self._serve(found)
