"""Run the jobs of a worker beside firing.

They are leases, heartbeat, sweep, sync, pruning, and what operators have begun. Several jobs share a thread and
its database connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeAlias

from django.db import Error as DatabaseError
from django.db import connections

import django_delayq
from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.arming.sync import TableSync
from django_delayq.backoff import Backoff, StateLog
from django_delayq.conf import get_settings
from django_delayq.exceptions import EngineError, EngineFull, suggestion
from django_delayq.firing.log_lines import log_unknown_policy
from django_delayq.firing.running import EXTEND_LOCKED_SECONDS, extend_firing
from django_delayq.firing.state import firing_state
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.db_connections import check_connections
from django_delayq.ledger.error_texts import message_of, shown
from django_delayq.ledger.rollups import roll_up
from django_delayq.ledger.search import MAX_COUNT
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.operations.changes import ABANDONED_AFTER, MISSED_EVERY, continue_moves, move_missed
from django_delayq.operations.policies import end_holds
from django_delayq.policy.policies import declared_queues, registry
from django_delayq.worker.parts import WorkerParts
from django_delayq.worker.sources.redis import Sources
from django_delayq.worker.sweep import Sweep, prune, settle_all_expired, turn
from django_delayq.worker.watchdog import Progress

logger = logging.getLogger("django_delayq.worker")

LONGEST_RETRY_SECONDS: Final = 30.0
"""An outage of hours is over for at most this long before jobs notice it."""
SLOW_SECONDS: Final = 30.0
"""A quick job, or a page of the sweep, that waits for the database for longer opens another connection."""
HEARTBEAT_INTERVAL: Final = timedelta(seconds=5)
"""A worker counts as missing after a few of them. More often would write to idle databases for nothing."""
FORGET_AFTER: Final = timedelta(hours=1)
"""Rows of workers that were killed are shown as missing for this long, and are then deleted by other workers."""
PRUNE_INTERVAL: Final = timedelta(hours=1)
"""The rows of an hour are deleted in seconds; more often would read the index for nothing."""
ROLL_UP_INTERVAL: Final = timedelta(minutes=1)
"""A report reads the rows of about so long from the ledger; more often would write to idle databases for nothing."""
SELDOM_SECONDS: Final = 30.0
"""How often a worker searches rows of lost workers, and of queues that no policy names: also a hundred workers do."""
Between: TypeAlias = Callable[[], object]
"""What a long job calls between two pages."""


def third_of_a_lease() -> float:
    """Return the seconds between two extensions, after which a worker also releases what it has not begun."""
    return get_settings().lease.total_seconds() / 3


class Job:
    """A periodic job, and the time of its next run. For one thread.

    `work` is called for the first time after `begins_in` seconds, and returns how many seconds later it is to be called
    again. A failure never ends the job. It is logged once while errors of the same kind follow, and the job is run
    again after 1, 2, 4 ... `longest` seconds.
    """

    def __init__(
        self, name: str, work: Callable[[], float], *, begins_in: float = 0.0, longest: float = LONGEST_RETRY_SECONDS
    ) -> None:
        self.name = f"delayq-{name}"
        self._work = work
        self._backoff = Backoff(1.0, longest)
        self._log = StateLog(logger, "background_failed", "background_recovered", job=self.name)
        self._due_at = time.monotonic() + begins_in

    @classmethod
    def every(
        cls, interval: timedelta, name: str, work: Callable[[], object], *, longest: float = LONGEST_RETRY_SECONDS
    ) -> Job:
        """Return a job that runs once in each interval; after many failures, not more often."""
        seconds = interval.total_seconds()

        def run() -> float:
            work()
            return seconds

        return cls(name, run, longest=max(seconds, longest))

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next run. 0: it is due."""
        return max(0.0, self._due_at - time.monotonic())

    def hasten(self) -> None:
        """Make the job due now."""
        self._due_at = time.monotonic()

    def run(self) -> None:
        """Run the job once, and once more on another connection if its own was broken. Raises nothing."""
        failure = self._attempt()
        # The server may have cut it while it was idle. To test it before each run would cost a statement each time.
        if failure is not None and check_connections(error=failure):
            failure = self._attempt()
        if failure is not None:
            self._backoff.failed()
            self._due_at = self._backoff.retry_at
            if not isinstance(failure, EngineError):  # `RedisHealth` logs an outage of Redis
                self._log.failed(
                    "%s failed and is tried again: %s",
                    self.name,
                    message_of(failure),
                    kind=type(failure),
                    exc_info=None if isinstance(failure, DatabaseError) else shown(failure),
                )
        else:
            self._backoff.succeeded()
            self._log.recovered("%s works again", self.name)
        check_connections(error=failure)

    def _attempt(self) -> BaseException | None:
        try:
            seconds = self._work()
        except BaseException as error:  # noqa: BLE001 - also SystemExit, which would end the thread silently
            return error
        self._due_at = time.monotonic() + seconds
        return None


def leases_job(sources: Sources, firing_non_atomic: Callable[[], list[int]], using: str) -> Job:
    """Return the job that extends all leases of the worker, and those of locked rows soon again."""

    def extend() -> float:
        sources.extend()
        are_extended = extend_firing(firing_non_atomic(), using)
        return third_of_a_lease() if are_extended else min(third_of_a_lease(), EXTEND_LOCKED_SECONDS)

    # Leases must not expire after an outage that is shorter than they are.
    return Job("leases", extend, begins_in=third_of_a_lease(), longest=min(third_of_a_lease(), 5.0))


class PeriodicThread(threading.Thread):
    """A thread that runs its `jobs` when they are due, the first one first, until stopped.

    A job that takes long calls `run_urgent` between its pages, so that it does not delay the jobs before it.
    """

    def __init__(self, name: str, progress: Progress | None = None) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self._progress = progress
        self.jobs: list[Job] = []
        """In order of priority. Fill it before the start."""
        self.at_end: Callable[[], object] = lambda: None
        """What the thread calls when it has been stopped."""
        self._running: Job | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End the thread after the current job."""
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_due(self.jobs)
                began = time.monotonic()
                if not self._stopping.wait(min((job.seconds_left for job in self.jobs), default=None)):
                    check_connections(idle_seconds=time.monotonic() - began)
            self.at_end()
        finally:
            connections.close_all()

    def run_urgent(self) -> None:
        """Run the due jobs before the current one. For that job, between two pages, outside a transaction.

        Also return a pooled connection, so that another thread of the worker can use it meanwhile.
        """
        check_connections()
        running = self._running
        self._run_due([*takewhile(lambda job: job is not running, self.jobs)])
        self._running = running
        if self._progress is not None:
            self._progress.renew()

    def _run_due(self, jobs: list[Job]) -> None:
        """Run those of `jobs` that are due. After each run the first one has priority again."""
        while not self._stopping.is_set():
            self._running = next((job for job in jobs if not job.seconds_left), None)
            if self._running is None:
                return
            with contextlib.nullcontext() if self._progress is None else self._progress.step():
                self._running.run()


class Heartbeat:
    """The worker's row in the ledger. A thread of its own writes it, so that a main loop that hangs is noticed."""

    def __init__(self, worker: WorkerParts) -> None:
        self._worker = worker
        self._rows = WorkerSeen.objects.using(worker.using)
        self._forgotten_at = -SELDOM_SECONDS
        self._facts: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname()[:100],
            "pid": os.getpid(),
            "queues": worker.only,
            "concurrency": worker.concurrency,
            "version": django_delayq.__version__,
        }

    def beat(self, in_flight: int) -> None:
        """Write the worker's row, and delete rows of workers that ended long ago. Raises the database's errors."""
        now = self._worker.skew.now()
        self._facts.setdefault("started_at", now)
        news: dict[str, Any] = {
            "seen_at": now,
            "passed_at": now - timedelta(seconds=time.monotonic() - self._worker.passed_at),
            "uses_redis": self._worker.redis.is_up,
            "held": in_flight,
            "stuck_threads": firing_state.stuck_threads,
        }
        if not self._rows.filter(pk=self._facts["id"]).update(**news):
            self._rows.create(**self._facts, **news)
        if time.monotonic() - self._forgotten_at >= SELDOM_SECONDS:
            self._forgotten_at = time.monotonic()
            self._rows.filter(seen_at__lt=now - FORGET_AFTER).delete()

    def end(self) -> None:
        """Delete the worker's row. If that fails, other workers delete it later."""
        with contextlib.suppress(DatabaseError):
            self._rows.filter(pk=self._facts["id"]).delete()


class Background:
    """The sweep, the sync and the pruning of one worker. Each method may be called by one thread at a time."""

    def __init__(self, worker: WorkerParts) -> None:
        self._worker, self._redis, self._using = worker, worker.redis, worker.using
        self.progress = Progress("thread for leases and sweeps", worker.using, SLOW_SECONDS)
        self._sweep: Sweep | None = None
        self._known_queues = set(worker.queues)
        self._queues_at = 0.0
        self.tables = TableSync(worker.using)

    def threads(self, firing_non_atomic: Callable[[], list[int]], in_flight: Callable[[], int]) -> list[PeriodicThread]:
        """Return the thread that extends the leases, which ends last, and the others. Each has one connection.

        In a burst the leases are the only job. The arguments are those of `Dispatch`.
        """
        # A process that is suspended for longer than its lease continues. The ledger decides whether it may commit.
        quick = PeriodicThread("quick-jobs", self.progress)
        quick.jobs.append(leases_job(self._worker.sources, firing_non_atomic, self._using))
        if self._worker.is_burst:
            return [quick]

        def sweep() -> float:
            self.sweep(quick.run_urgent)
            return min(get_settings().sweep_interval.total_seconds(), self._redis.probe_seconds)

        heartbeat = Heartbeat(self._worker)
        beat = Job.every(HEARTBEAT_INTERVAL, "heartbeat", lambda: heartbeat.beat(in_flight()))
        # After an outage, what fell due meanwhile from beyond the horizon waits for the sweep. What `follow` does may
        # fail for long without stopping that.
        follow = Job.every(get_settings().sweep_interval, "follow", self.follow, longest=Backoff.longest)
        quick.jobs += [beat, follow, Job("sweep", sweep, longest=Backoff.longest)]
        quick.at_end = heartbeat.end
        # Its jobs read or lock the tables of the project, where a migration may block them for long. Those of the first
        # thread use only the library's own tables and Redis.
        slow = PeriodicThread("slow-jobs")
        moves = partial(continue_moves, self._using, left_alone=ABANDONED_AFTER)
        sync = Job("sync", lambda: self.tables.run(slow.run_urgent))

        def due_changes() -> None:
            self.end_holds()
            if stop_cache.recent(self._using).wants_sync:
                sync.hasten()

        slow.jobs += [
            Job.every(get_settings().sweep_interval, "holds", due_changes, longest=Backoff.longest),
            Job.every(min(6 * get_settings().sweep_interval, ABANDONED_AFTER), "moves", moves),
            Job.every(MISSED_EVERY, "missed-moves", partial(move_missed, self._using)),
            sync,
            Job.every(ROLL_UP_INTERVAL, "roll-up", lambda: self._in_turn("roll-up", ROLL_UP_INTERVAL, roll_up, slow)),
            Job.every(PRUNE_INTERVAL, "prune", lambda: self._in_turn("prune", PRUNE_INTERVAL, prune, slow)),
        ]
        return [quick, slow]

    def sweep(self, between: Between = check_connections, *, everything: bool = False) -> None:
        """Sweep if it is this worker's turn. If Redis is unavailable, probe it, and sweep everything once it is back.

        `everything`: sweep everything, without waiting for a turn. Raises the database's errors.
        """
        if self._redis.engine is None:
            return
        self._sweep = self._sweep or Sweep(self._redis.engine, self._using, self._worker.skew)
        was_up = self._redis.is_up
        try:
            if was_up:
                self._sweep.run_once(everything=everything, between=between)
                self._serve(self._sweep.queues)
                self._redis.accepted()
                return
            self._redis.probe(self._known_queues)
            try:
                self._sweep.run_once(everything=True, between=between)
            except EngineFull as error:
                self._redis.failed(error)
            self._redis.recovered()
            self._worker.wake()
        except EngineError as error:
            self._redis.failed(error, was_probe=not was_up)

    def _in_turn(
        self, name: str, interval: timedelta, work: Callable[[str, Between], object], thread: PeriodicThread
    ) -> None:
        """Call `work` if it is this worker's turn, or without Redis. It calls urgent jobs between its pages."""
        try:
            with turn(self._redis.engine if self._redis.is_up else None, name, interval) as is_ours:
                if is_ours:
                    work(self._using, thread.run_urgent)
        except EngineError as error:
            self._redis.failed(error)
            work(self._using, thread.run_urgent)

    def follow(self) -> None:
        """Read the database clock and what is stopped, find queues, and settle timeouts of dead workers.

        Raises the database's errors.
        """
        news = stop_cache.read_stop_changes(self._using)
        self._worker.skew.note_answer(news.now, news.asked_at)
        self._find_forgotten()
        if news.has_expired:
            settle_all_expired(self._using)

    def end_holds(self) -> None:
        """Resume the policies and the timeouts whose holds have reached their end. Raises the database's errors."""
        if end_holds(self._using) + end_holds_by_hand(self._using):
            self._worker.wake()

    def _find_forgotten(self) -> None:
        """Serve the queues that no policy names any more, and log the labels that no policy has, if rows are due."""
        if time.monotonic() < self._queues_at:
            return
        queues, labels = forgotten(self._using, self._worker.only, self._worker.skew.now())
        self._queues_at = time.monotonic() + SELDOM_SECONDS
        self._serve(queues)
        for label in labels:
            log_unknown_policy(label)

    def _serve(self, queues: Collection[str]) -> None:
        """Have the worker serve those of `queues` that it does not know, unless it is restricted to some."""
        found = sorted(set(queues) - self._known_queues)
        if found and self._worker.only is None:
            self._known_queues.update(found)
            self._worker.found_queues.put(found)


def forgotten(using: str, only: Collection[str] | None, now: datetime) -> tuple[set[str], list[str]]:
    """Return the queues of rows that are due at `now` or nearly so, and those of their labels that no policy has.

    Rows of the queues `only`; None: of all.
    """
    soon = now + 2 * get_settings().sweep_interval + timedelta(seconds=1)
    rows = Timeout.objects.using(using).pending().filter(run_at__lte=soon).order_by("run_at", "id")
    rows = rows if only is None else rows.filter(queue__in=only)
    found = set(rows.values_list("queue", "policy")[:MAX_COUNT])  # behind a longer backlog, when that is gone
    labels = {label for _, label in found if registry.get(label) is None}
    return {queue for queue, _ in found}, sorted(labels)


def warn_of_unknown_queues(wanted: Iterable[str], using: str) -> None:
    """Log those of `wanted` that no policy and no row names: most likely they are misspelled."""
    known = declared_queues()
    for queue in wanted:
        if queue in known or Timeout.objects.using(using).unsettled().filter(queue=queue).exists():
            continue
        hint = suggestion(queue, known, f"Known are {', '.join(known)}.")
        logger.warning("No policy uses the queue %r. %s", queue, hint, extra={"event": "queue_unknown", "queue": queue})
