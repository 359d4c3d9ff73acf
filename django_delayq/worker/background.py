"""The jobs of a worker beside firing: leases, heartbeat, sweep, sync, pruning, and what operators have begun.

Several jobs share a thread and its database connection.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django.db import Error as DatabaseError
from django.db import connections

import django_delayq
from django_delayq import clock
from django_delayq.arming.sync import TableSync
from django_delayq.backoff import Backoff, StateLog
from django_delayq.conf import get_settings
from django_delayq.exceptions import EngineError, EngineFull
from django_delayq.firing import extend_firing
from django_delayq.firing.running import EXTEND_LOCKED_SECONDS
from django_delayq.firing.state import firing_state
from django_delayq.ledger.controls import News, Stopped, stop_cache
from django_delayq.ledger.db_connections import check_connections
from django_delayq.ledger.history import message_of, shown
from django_delayq.ledger.installation import check_prefix
from django_delayq.ledger.statements import Param, compiled, update
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.operations.changes import ABANDONED_AFTER, MISSED_EVERY, continue_moves, move_missed, requeue_due
from django_delayq.policies import declared_queues, registry
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.servers import ClockSkew, RedisHealth
from django_delayq.worker.sources.redis import Sources
from django_delayq.worker.sweep import Sweep, prune, settle_all_expired, turn

if TYPE_CHECKING:
    from django.db.models.sql import UpdateQuery

logger = logging.getLogger("django_delayq.worker")

FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 30.0
HEARTBEAT_SECONDS: Final = 5.0
FORGET_AFTER: Final = timedelta(hours=1)
"""Rows of workers that were killed are shown as missing for this long, and are then deleted by other workers."""
FORGET_SECONDS: Final = 60.0
PRUNE_INTERVAL: Final = timedelta(hours=1)
QUEUES_SECONDS: Final = 30.0
MAX_QUEUE_ROWS: Final = 10_000
"""Read in one search for queues. Behind a longer backlog a forgotten queue is found when the backlog is gone."""
LOOK_BACK: Final = timedelta(seconds=10)
Between: TypeAlias = Callable[[], object]
"""What a long job calls between two pages."""


def third_of_a_lease() -> float:
    """Return the seconds between two extensions, after which a worker also releases what it has not begun."""
    return get_settings().lease.total_seconds() / 3


class Job:
    """A periodic job, and the time of its next run. For one thread.

    `work` is called every `seconds` (a callable is called each time), also at the start if it `is_immediate`, and
    `at_end` when the thread ends. A failure never ends the job. It is logged once while errors of the same kind follow,
    and the job is run again after 1, 2, 4 ... 30 seconds, or its own interval if that is longer; or up to `longest`.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        seconds: float | Callable[[], float],
        *,
        is_immediate: bool = True,
        at_end: Callable[[], object] = lambda: None,
        longest: float | None = None,
    ) -> None:
        self.name = f"delayq-{name}"
        self.at_end = at_end
        self._work = work
        self._seconds = seconds
        self._backoff = Backoff(FIRST_RETRY_SECONDS, longest or max(self._interval(), LONGEST_RETRY_SECONDS))
        self._log = StateLog(logger, "duty_failed", "duty_back", duty=self.name)
        self._due_at = time.monotonic() + (0 if is_immediate else self._interval())

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next run. 0: it is due."""
        return max(0.0, self._due_at - time.monotonic())

    def run(self) -> None:
        """Run the job once, and once more on another connection if its own was broken. Raises nothing."""
        failure = self._attempt()
        # The server may have cut it while it was idle. To test it before each run would cost a statement each time.
        if failure is not None and check_connections(error=failure):
            failure = self._attempt()
        if failure is not None:
            self._backoff.failed()
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
            self._log.recovered("%s works again", self.name, level=logging.INFO)
        check_connections(error=failure)
        self._due_at = self._backoff.retry_at if failure else time.monotonic() + self._interval()

    def _attempt(self) -> Exception | None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the other jobs need this thread
            return error
        return None

    def _interval(self) -> float:
        return float(self._seconds() if callable(self._seconds) else self._seconds)


def leases_job(sources: Sources, dispatch: Dispatch, using: str) -> Job:
    """Return the job that extends all leases of the worker, and those of locked rows soon again."""
    are_extended = True

    def extend() -> None:
        nonlocal are_extended
        sources.extend()
        are_extended = extend_firing(dispatch.firing_non_atomic(), using)

    def seconds() -> float:
        return third_of_a_lease() if are_extended else min(third_of_a_lease(), EXTEND_LOCKED_SECONDS)

    # Leases must not expire after an outage that is shorter than they are.
    return Job("leases", extend, seconds, is_immediate=False, longest=min(third_of_a_lease(), 5.0))


class PeriodicThread(threading.Thread):
    """A thread that runs its `jobs` when they are due, the first one first, until stopped.

    A job that takes long calls `run_urgent` between its pages, so that it does not delay the jobs before it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self.jobs: list[Job] = []
        """In order of priority. Fill it before the start."""
        self._running: Job | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End the thread after the current job."""
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_due(self.jobs)
                self._stopping.wait(min((job.seconds_left for job in self.jobs), default=None))
            for job in self.jobs:
                job.at_end()
        finally:
            connections.close_all()

    def run_urgent(self) -> None:
        """Run the due jobs before the current one. For that job, between two pages, outside a transaction.

        Also return a pooled connection, so that another thread of the worker can use it meanwhile.
        """
        check_connections()
        running = self._running
        if threading.current_thread() is self and running is not None:
            self._run_due(self.jobs[: self.jobs.index(running)])
            self._running = running

    def _run_due(self, jobs: list[Job]) -> None:
        """Run those of `jobs` that are due. After each run the first one has priority again."""
        while not self._stopping.is_set():
            self._running = next((job for job in jobs if not job.seconds_left), None)
            if self._running is None:
                return
            self._running.run()


class Heartbeat:
    """The worker's row in the ledger. A thread of its own writes it, so that a main loop that hangs is noticed."""

    def __init__(self, using: str, queues: Sequence[str] | None, concurrency: int, skew: ClockSkew) -> None:
        self._using = using
        self._skew = skew
        self._forgotten_at = -FORGET_SECONDS
        self._row = WorkerSeen(
            id=uuid.uuid4().hex,
            host=socket.gethostname()[:100],
            pid=os.getpid(),
            queues=None if queues is None else list(queues),
            concurrency=concurrency,
            version=django_delayq.__version__,
        )

    def beat(self, *, uses_redis: bool, passed_at: float, in_flight: int) -> None:
        """Write the worker's row, and delete rows of workers that ended long ago. Raises the database's errors.

        `passed_at` is `time.monotonic()` of the last pass of the main loop.
        """
        now, row, is_first = self._skew.now(), self._row, self._row.started_at is None
        if is_first:
            row.started_at = now
        row.seen_at, row.passed_at = now, now - timedelta(seconds=time.monotonic() - passed_at)
        row.uses_redis, row.held, row.stuck_threads = uses_redis, in_flight, firing_state.stuck_threads
        if is_first or not _beat.execute(self._using, **{name: getattr(row, name) for name in ("pk", *_BEAT)}):
            row.save(using=self._using, force_insert=True)
        if time.monotonic() - self._forgotten_at >= FORGET_SECONDS:
            self._forgotten_at = time.monotonic()
            WorkerSeen.objects.using(self._using).filter(seen_at__lt=now - FORGET_AFTER).delete()

    def end(self) -> None:
        """Delete the worker's row. If that fails, other workers delete it later."""
        with contextlib.suppress(DatabaseError):
            WorkerSeen.objects.using(self._using).filter(pk=self._row.pk).delete()


_BEAT = ("seen_at", "passed_at", "uses_redis", "held", "stuck_threads")


@compiled
def _beat(using: str) -> UpdateQuery:
    field: Any = WorkerSeen._meta.get_field
    row = WorkerSeen.objects.using(using).filter(pk=Param(field("id"), "pk"))
    return update(row, **{name: Param(field(name)) for name in _BEAT})


class Background:
    """The sweep, the sync and the pruning of one worker. Each method may be called by one thread at a time.

    `serve` is called with queues that only rows name (None: do not search for them), and `wake` when the worker has
    a reason to check its sources.
    """

    def __init__(
        self,
        redis: RedisHealth,
        using: str,
        skew: ClockSkew,
        *,
        serve: Callable[[Sequence[str]], None] | None,
        known_queues: Sequence[str],
        wake: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._using = using
        self._skew = skew
        self._sweep = None if redis.engine is None else Sweep(redis.engine, using, skew)
        self._serve = serve
        self._known_queues = set(known_queues)
        self._wake = wake
        self._queues_at = 0.0
        self._news = News(0.0, clock.now(), False, Stopped(), {}, {})
        self._tables, self._sync_seconds = TableSync(using), 0.0

    def threads(
        self, sources: Sources, dispatch: Dispatch, heartbeat: Heartbeat | None, passed_at: Callable[[], float]
    ) -> list[PeriodicThread]:
        """Return the thread that extends the leases, which ends last, and the others. Each has one connection.

        Without a `heartbeat`, as in a burst, the leases are its only job. `passed_at`: see `Heartbeat.beat`.
        """
        # A process that is suspended for longer than its lease continues. The ledger decides whether it may commit.
        quick = PeriodicThread("quick-jobs")
        quick.jobs.append(leases_job(sources, dispatch, self._using))
        if heartbeat is None:
            return [quick]

        def beat() -> None:
            heartbeat.beat(uses_redis=self._redis.is_up, passed_at=passed_at(), in_flight=dispatch.in_flight)

        def sweep_seconds() -> float:
            interval = get_settings().sweep_interval.total_seconds()
            is_away = self._redis.engine is not None and not self._redis.is_up
            return min(interval, self._redis.probe_seconds) if is_away else interval

        quick.jobs.append(Job("heartbeat", beat, HEARTBEAT_SECONDS, at_end=heartbeat.end))
        quick.jobs.append(Job("sweep", lambda: self.sweep(quick.run_urgent), sweep_seconds))
        # Its jobs read or lock the tables of the project, where a migration may block them for long. Those of the first
        # thread use only the library's own tables and Redis.
        slow = PeriodicThread("slow-jobs")
        moves = partial(continue_moves, self._using, left_alone=ABANDONED_AFTER)
        moves_seconds = min(6 * get_settings().sweep_interval, ABANDONED_AFTER).total_seconds()
        slow.jobs.append(Job("moves", moves, moves_seconds))
        slow.jobs.append(Job("missed-moves", partial(move_missed, self._using), MISSED_EVERY.total_seconds()))
        slow.jobs.append(Job("sync", lambda: self.sync(slow.run_urgent), lambda: self._sync_seconds))
        slow.jobs.append(Job("prune", lambda: self._prune(slow.run_urgent), PRUNE_INTERVAL.total_seconds()))
        return [quick, slow]

    def sweep(self, between: Between = check_connections) -> None:
        """Sweep if it is this worker's turn. If Redis is unavailable, probe it, and sweep everything once it is back.

        Raises the database's errors.
        """
        self._read_news()
        self._find_queues()
        if self._sweep is None:
            return
        was_up = self._redis.is_up
        try:
            if was_up:
                check_prefix(self._redis.engine)
                self._sweep.run_once(between=between)
                self._redis.accepted()
                return
            self._redis.probe(self._known_queues)
            try:
                self._sweep.run_once(everything=True, between=between)
            except EngineFull as error:
                self._redis.failed(error)
            self._redis.recovered()
            self._wake()
        except EngineError as error:
            self._redis.failed(error, was_probe=not was_up)

    def sweep_everything(self) -> None:
        """Sweep everything, for a worker that does not wait for its turn. Raises EngineError too."""
        settle_all_expired(self._using)
        self._find_queues()
        if self._sweep is not None and self._redis.is_up:
            self._sweep.run_once(everything=True)

    def sync(self, between: Between = check_connections, *, at_once: bool = False) -> None:
        """Update the ledger from the tables of automatic policies: a slice, or with `at_once` all policies.

        Raises the database's errors.
        """
        self._sync_seconds = self._tables.run(between, at_once=at_once)

    def _prune(self, between: Between) -> None:
        try:
            with turn(self._redis.engine if self._redis.is_up else None, "prune", PRUNE_INTERVAL) as is_ours:
                if is_ours:
                    prune(self._using, between=between)
                return
        except EngineError as error:
            self._redis.failed(error)
        prune(self._using, between=between)

    def _read_news(self) -> None:
        """Read the database clock, settle the timeouts of workers that died, and requeue those of resumed policies.

        A policy is resumed by an operator, or by the end of its pause.
        """
        # A worker may defer a timeout just after its policy was resumed, and a change becomes visible at its commit,
        # later than its own time. So compare what is stopped, too, and include the last seconds.
        before, news = self._news, stop_cache.read_news(self._using)
        self._news = news
        self._skew.note_answer(news.now, news.asked_at)
        if news.has_expired:
            settle_all_expired(self._using)
        for label in (before.stopped.keys() - news.stopped.keys()) | news.resumed_since(before.now - LOOK_BACK):
            if policy := registry.get(label):
                requeue_due(policy, self._using)
                self._wake()

    def _find_queues(self) -> None:
        if self._serve is not None and time.monotonic() >= self._queues_at:
            found = forgotten_queues(self._using, self._known_queues, self._skew.now())
            self._queues_at = time.monotonic() + QUEUES_SECONDS
            if found:
                self._known_queues.update(found)
                self._serve(found)


def forgotten_queues(using: str, known: Collection[str], now: datetime) -> list[str]:
    """Return queues that no policy names any more, but rows that are due at `now` or nearly so."""
    soon = now + 2 * get_settings().sweep_interval + timedelta(seconds=1)
    rows = Timeout.objects.using(using).pending().filter(run_at__lte=soon).order_by("run_at", "id")
    return sorted(set(rows.values_list("queue", flat=True)[:MAX_QUEUE_ROWS]) - set(known))


def warn_of_unknown_queues(wanted: Iterable[str], using: str) -> None:
    """Log those of `wanted` that no policy and no row names: most likely they are misspelled."""
    known = declared_queues()
    for queue in wanted:
        if queue in known or Timeout.objects.using(using).unsettled().filter(queue=queue).exists():
            continue
        near = difflib.get_close_matches(queue, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        logger.warning("No policy uses the queue %r: %s", queue, hint, extra={"event": "queue_unknown", "queue": queue})
