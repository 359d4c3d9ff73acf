"""The worker: start, fire due timeouts, stop."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Final, TypeVar

from django.db import Error as DatabaseError
from django.db import connections

from django_delayq import __version__
from django_delayq.exceptions import DelayqError, EngineError, WrongInstallation
from django_delayq.firing.executors import make_executor
from django_delayq.firing.state import firing_state
from django_delayq.ledger import installation
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.db_connections import (
    check_connections,
    not_migrated,
    open_connection,
    pool_limit,
    server_limit,
)
from django_delayq.ledger.declarations import check_names
from django_delayq.models import Timeout
from django_delayq.policy.policies import get_policies
from django_delayq.redis_clients import get_worker_engine
from django_delayq.signals import worker_started
from django_delayq.times.clock import brief, plural
from django_delayq.worker.background import Background, PeriodicThread, third_of_a_lease, warn_of_unknown_queues
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.parts import WorkerParts
from django_delayq.worker.servers import DatabaseHealth
from django_delayq.worker.sources.ledger import POLL_SECONDS, slot_seconds
from django_delayq.worker.watchdog import Progress, watching

logger = logging.getLogger("django_delayq.worker")
T = TypeVar("T")

JOIN_SECONDS: Final = 5.0
"""The longest wait for a thread of the worker at its end: one that hangs in a driver must not keep the process."""
COLLECT_SECONDS: Final = 0.01
"""How far two passes lie apart at least while works run. A pass for each report was half of the CPU of a backlog."""
SLOW_SECONDS: Final = 10.0
"""A pass that waits for the database for longer opens another connection: its statements take milliseconds."""
MAX_STUCK_PER_THREAD: Final = 4
"""A worker with so many stuck threads for each handler thread ends, to be started again."""
BURST_CHECK_SECONDS: Final = 0.05
"""How often a burst that waits for running handlers of others checks again."""
BURST_IDLE_SECONDS: Final = 5.0
"""How long a burst waits without progress for timeouts that it cannot fire now, for example locked ones."""
BURST_AWAY_SECONDS: Final = 60.0
"""How long a burst waits for a database that fails: cron starts the next one, and they must not pile up."""
MAX_SLOT_SECONDS: Final = 60.0
"""For longer, a burst does not wait for the next slot of a policy with a rate: cron starts the next one."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Worker(WorkerParts):
    """Fires due timeouts until it is stopped. Call `run` once, in one thread, and `stop` from any.

    Args:
        queues: the queues to serve; None: those of all declared policies, and those that only rows name.
        concurrency: how many handlers run at once; by default the setting `CONCURRENCY`.
        burst: end when nothing is due.
        max_timeouts: end after this many timeouts.
        using: the database; by default where the routers write the ledger.

    Raises:
        ConfigError: the settings are wrong, or the connection pool is too small for any handler.
    """

    def __init__(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int | None = None,
        burst: bool = False,
        max_timeouts: int | None = None,
        using: str | None = None,
    ) -> None:
        super().__init__(queues=queues, concurrency=concurrency, burst=burst, using=using)
        self.counts: Mapping[str, int] = {}
        """At its end: how many timeouts had each outcome, and after a hard stop, were running and left to others."""
        self.is_stuck = False
        """Whether it has ended because too many of its threads run handlers that do not end."""
        self.gave_up = False
        """Whether it is a burst that has ended because the database failed for too long."""
        self._max_timeouts = sys.maxsize if max_timeouts is None else max_timeouts
        self.exits: Callable[[int], object] | None = None
        """What ends the process if the main loop hangs, by its exit code; None: the process has other work, too."""
        self.progress = Progress("main loop", self.using, SLOW_SECONDS)
        self._stopping = self._hard = False
        self._began_at = self.passed_at
        self._progress = 0, self.passed_at
        self._database = DatabaseHealth(self.using)

    def __str__(self) -> str:
        queues = ", ".join(self.queues) if self.only else "all queues"
        source = "woken by Redis" if self.redis.is_up else "reading the database once a second"
        threads = plural(self.concurrency, "thread")
        return f"serves {queues} of database {self.using!r} with {threads}, {source}"

    @property
    def has_failed(self) -> bool:
        """Return whether the process has to exit with 1."""
        return bool(self.counts.get("aborted")) or self.is_stuck or self.gave_up

    def stop(self, *, hard: bool = False) -> None:
        """End `run` soon: release timeouts that have not begun, and wait for running handlers.

        For any thread, and for signal handlers.

        Args:
            hard: do not wait for handlers either. Their transactions roll back, and the timeouts are retried.
        """
        # A signal handler may run between any two instructions: `x = x or y` would undo what it sets.
        if hard:
            self._hard = True
        self._stopping = True
        self.wake()

    def run(self) -> None:
        """Fire due timeouts until `stop`, or until a burst or `max_timeouts` is over. No failure of a server ends it.

        Raises ConfigError if the database allows too few connections for any handler, and WrongInstallation, before it
        writes anything, if the ledger belongs to another installation; before it fires anything, if a copy of one
        replaces the ledger later. A burst raises NotMigrated if tables are missing; otherwise the worker waits
        for them. DelayqError: this thread has a transaction open.
        """
        if connections[self.using].in_atomic_block:
            raise DelayqError(
                "A worker fires in threads with connections of their own, which do not see the rows of the transaction "
                "that is open here, such as that of a TestCase. Test with TransactionTestCase, or in a TestCase with "
                "django_delayq.testing.fire_due()."
            )
        self._background = Background(self)
        watched = [self.progress, self._background.progress]
        with self._stopping_on_signals(), watching(watched, lambda: self._hard, self.exits):
            try:
                if self._is_admitted():
                    self._repeat_passes()
            finally:
                if self.redis.engine is not None:
                    self.redis.engine.close()

    def _repeat_passes(self) -> None:
        if open_connection(self.using) and pool_limit(self.using) is None:
            with suppress(DatabaseError):
                self.limit_concurrency(server_limit(self.using))
        dispatch = Dispatch(self, make_executor(self.using, self.concurrency, self.only))
        background = self._background
        threads = background.threads(dispatch.firing_non_atomic, lambda: dispatch.in_flight)
        try:
            for thread in threads:
                thread.start()
            self._wakeup.start()
            worker_started.send_robust(type(self), worker=self)
            facts = {"queues": self.only, "threads": self.concurrency, "version": __version__}
            logger.info("The worker %s", self, extra={"event": "worker_started", **facts})
            self._try(lambda: self._prepare(background), may_be_long=self.is_burst)
            while not self._stopping:
                seconds = self._try(lambda: self._pass(dispatch)) or self._database.seconds_left
                self._give_up_burst()
                seconds = min(seconds, dispatch.seconds_left)
                dispatch.let_run()
                if seconds > 0 and not self._stopping and self._wakeup.wait(seconds):
                    self.sources.check_now()
                pause = self.passed_at + COLLECT_SECONDS - time.monotonic()
                time.sleep(max(0.0, min(pause, dispatch.seconds_left)) if dispatch.in_flight else 0.0)
        finally:
            self._end(dispatch, threads)

    def _is_admitted(self) -> bool:
        """Wait until the ledger has its tables and is this installation's; return False if stopped first.

        Raises WrongInstallation, and PolicyError for names by which the ledger does not know its timeouts; in a burst
        NotMigrated.
        """
        while not self._stopping:
            try:
                with self.progress.step():
                    installation.check(self.using)
                    check_names(self.using)
                    self._connect(get_worker_engine(self.using))
                    self.redis.probe_at_start(self.queues)
                self._database.recovered(was_idle=True)
                return True
            except DatabaseError as error:
                if self.is_burst and (missing := not_migrated(error, self.using)):
                    raise missing from error
                self._database.failed(error)
                self._give_up_burst()
                if not self._stopping:
                    self._wakeup.wait(self._database.seconds_left)
            finally:
                check_connections()
        return False

    def _prepare(self, background: Background) -> None:
        self.skew.ask_database()
        if self.only is not None:
            warn_of_unknown_queues(self.only, self.using)
        if self.is_burst:
            background.end_holds()
            background.tables.run(check_connections, at_once=True)
            background.sweep(everything=True)
            background.follow()

    def _pass(self, dispatch: Dispatch) -> float:
        """Submit what has become due, acknowledge what is completed, take more; return how many seconds to wait."""
        self.passed_at = time.monotonic()
        if firing_state.abandoned:
            self._check_stuck()
        dispatch.submit_due()
        dispatch.collect()
        dispatch.release(after_seconds=third_of_a_lease())
        self.sources.flush()
        self.serve_found_queues()
        if wait := self._database.seconds_left or dispatch.refused_for:
            return wait
        if dispatch.worked_on >= self._max_timeouts:
            self._stopping = True
        left = self._max_timeouts - dispatch.worked_on - dispatch.in_flight
        if left <= 0:
            return POLL_SECONDS
        self._database.check()
        batch, before = self.sources.take(dispatch.lines, left), dispatch.in_flight
        dispatch.add(batch)
        self._database.recovered(was_idle=not batch.deliveries)
        if batch.deliveries and dispatch.in_flight == before:
            return 0.0  # none of them needs a handler, whose end would wake the worker to take more
        if self.is_burst and not batch.deliveries and batch.wait_seconds and not dispatch.in_flight:
            return self._end_burst(dispatch, left)
        return batch.wait_seconds

    def _end_burst(self, dispatch: Dispatch, left: int) -> float:
        """Take due rows that Redis has not returned; without any, stop if the burst is over. Return as `_pass` does."""
        batch = self.sources.take_due_rows(dispatch.lines, left)
        dispatch.add(batch)
        if batch.deliveries:
            return 0.0
        if self._is_burst_over(dispatch.worked_on):
            self._stopping = True
        return BURST_CHECK_SECONDS

    def _give_up_burst(self) -> None:
        """End a burst whose database has failed for too long."""
        if self.is_burst and self._database.failing_seconds > BURST_AWAY_SECONDS and not self._stopping:
            self.gave_up = True
            words = "The burst ends, because its passes have failed for %.0f s"
            logger.error(words, self._database.failing_seconds, extra={"event": "burst_gave_up"})
            self.stop()

    def _check_stuck(self) -> None:
        """Stop if too many threads are stuck in handlers that were abandoned: only the end of the process ends them."""
        stuck = firing_state.stuck_threads
        if stuck >= MAX_STUCK_PER_THREAD * self.concurrency and not self._stopping:
            self.is_stuck = True
            words = "%s stuck in handlers beyond their time limit: the worker ends, for its supervisor to restart it"
            logger.error(words, plural(stuck, "thread is", "threads are"), extra={"event": "too_many_stuck"})
            self.stop()

    def _is_burst_over(self, worked_on: int) -> bool:
        """Return whether no row is due whose policy is declared here and not stopped.

        Due timeouts that cannot be fired now, because others lock their object or fire them, are waited for as long
        as there is progress, and for some seconds more; those of a policy with a rate until its next slot, if that is
        near. Raises the database's errors.
        """
        now = time.monotonic()
        if worked_on != self._progress[0]:
            self._progress = worked_on, now
        idle = now - self._progress[1] - BURST_IDLE_SECONDS
        awaited = [each for each in get_policies() if idle <= 0 or idle <= slot_seconds(each) <= MAX_SLOT_SECONDS]
        labels = {label for policy in awaited for label in policy.labels}
        labels -= set(stop_cache.confirmed(self.using).all_labels())
        rows = Timeout.objects.using(self.using).due().of_labels(labels)
        if self.only is not None:
            rows = rows.filter(queue__in=self.only)
        return not rows.exists()

    def _try(self, step: Callable[[], T], *, may_be_long: bool = False) -> T | None:
        """Return the result of `step`; after an error note it, and return None. Raises WrongInstallation."""
        with self.progress.step(may_be_long=may_be_long):
            try:
                return step()
            except EngineError as error:
                self.redis.failed(error)
            except WrongInstallation:
                raise
            except Exception as error:  # noqa: BLE001
                self._database.failed(error)
            finally:
                check_connections()
        return None

    def _end(self, dispatch: Dispatch, threads: Sequence[PeriodicThread]) -> None:
        """Stop: release what others can fire, wait for running handlers, then close everything else.

        The leases are extended until the last handler has ended, so that no other worker fires its timeouts.
        """
        keeper, *others = threads
        for thread in others:
            thread.stop()
        dispatch.collect()
        released = dispatch.release()
        self._try(self.sources.flush)
        if dispatch.in_flight and not self._hard:
            running, facts = plural(dispatch.in_flight, "running timeout"), {"running": dispatch.in_flight}
            logger.info("The worker completes %s, then stops", running, extra={"event": "worker_stopping", **facts})
        while dispatch.in_flight and not self._hard:
            self._wakeup.wait(POLL_SECONDS)
            if dispatch.collect():
                released += dispatch.release()  # a work that has missed its slot would wait for another one
                self._try(self.sources.flush)
        keeper.stop()
        aborted = dispatch.abandon()
        self._try(self.sources.flush)
        dispatch.close(wait=not self._hard)
        self._wakeup.close()
        for thread in threads:
            if thread.is_alive():
                thread.join(JOIN_SECONDS)
        self.counts = {**dispatch.outcomes, "released": released, "aborted": aborted}
        if self.processes == 1:
            log_summary(self._began_at, self.counts)

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """Stop on the first SIGTERM or SIGINT, and abort on the second. Outside the main thread none arrive.

        Both need a handler, because process 1 of a container ignores signals by default. Another thread counts them:
        Python calls no handler while the main thread waits in a driver.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        receiving, sending = socket.socketpair()
        sending.setblocking(False)
        with receiving:
            former = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
            thread = threading.Thread(target=self._obey_signals, args=(receiving,), name="delayq-signals", daemon=True)
            try:
                with signal_handlers(dict.fromkeys(STOP_SIGNALS, lambda *_: None)):
                    thread.start()
                    yield
            finally:
                signal.set_wakeup_fd(former)
                sending.close()  # which ends the thread
                thread.join()

    def _obey_signals(self, receiving: socket.socket) -> None:
        received = count(1)
        while numbers := receiving.recv(1):
            if numbers[0] in STOP_SIGNALS:
                self.stop(hard=next(received) > 1)


def log_summary(began_at: float, counts: Mapping[str, int]) -> None:
    """Log the outcomes of a worker that has ended, which began at `began_at` by `time.monotonic()`."""
    seconds, text = time.monotonic() - began_at, "The worker has stopped after %s: %s"
    words = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items() if count)
    facts = {"seconds": round(seconds), **counts}
    logger.info(text, brief(seconds), words or "nothing was fired", extra={"event": "worker_stopped", **facts})


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle these signals until the block ends. For the main thread."""
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
