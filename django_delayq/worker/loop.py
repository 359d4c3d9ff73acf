"""The worker: start, wait, stop."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Final, cast

from django.db import Error as DatabaseError
from django.db import router

from django_delayq.conf import get_settings
from django_delayq.engine import Wakeup
from django_delayq.exceptions import EngineError
from django_delayq.executors import Executor, make_executor
from django_delayq.ledger.db_connections import Limit, check_connections, open_connection, pool_limit, server_limit
from django_delayq.models import Timeout
from django_delayq.policies import declared_queues
from django_delayq.recovery.clocks import Clocks
from django_delayq.redis_clients import get_worker_engine
from django_delayq.signals import worker_started
from django_delayq.worker.appetite import Appetite
from django_delayq.worker.background import Background
from django_delayq.worker.burst import LOOK_SECONDS, Burst
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.heartbeat import Heartbeat
from django_delayq.worker.leases import lease_keeper, third_of_a_lease
from django_delayq.worker.link import Link
from django_delayq.worker.outage import Outage
from django_delayq.worker.periodic import PeriodicThread
from django_delayq.worker.queues import warn_of_unknown
from django_delayq.worker.shutdown import stopping_on_signals
from django_delayq.worker.sources.both import Sources
from django_delayq.worker.sources.ledger import Taken
from django_delayq.worker.sources.redis import LONGEST_WAIT_SECONDS

logger = logging.getLogger("django_delayq.worker")

JOIN_SECONDS: Final = 5.0


class Worker:
    """Fires what falls due, until it is stopped. `run` it once, in one thread; `stop` it from any.

    Args:
        queues: which to serve; None: those of all declared policies, and those that only rows name.
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
        self.using = using or router.db_for_write(Timeout)
        self.queues = list(dict.fromkeys(queues)) if queues else declared_queues()
        self.concurrency = concurrency or get_settings().concurrency
        self.abandoned = 0
        """After a hard stop: how many timeouts were running then, and were left to others."""
        self._only = self.queues if queues else None
        self._burst = Burst(self.using, self._only) if burst else None
        self._max_timeouts = max_timeouts
        self._stopping = self._hard = False
        self._database_used_at = self._passed_at = time.monotonic()
        self._found_queues: SimpleQueue[Sequence[str]] = SimpleQueue()
        self._clocks = Clocks(self.using)
        self._outage = Outage(self.using)
        self._fit(pool_limit(self.using))
        self._link = Link(get_worker_engine())
        self._sources = Sources(self._link, self.queues, self._only, self.using, self._clocks)
        self._bell = self._new_bell()

    def __str__(self) -> str:
        queues = ", ".join(self.queues) if self._only else "all queues"
        source = "the ledger, once a second" if self._link.engine is None else "Redis"
        return f"serves {queues} of database {self.using!r} with {self.concurrency} threads, woken by {source}"

    def stop(self, *, hard: bool = False) -> None:
        """`run` ends soon: what has not begun is given back at once, what runs is waited for. For signal handlers too.

        Args:
            hard: it is not waited for either. Nothing is lost: what is not committed then comes again.
        """
        self._stopping = True
        self._hard = self._hard or hard
        self.wake()

    def wake(self) -> None:
        """The worker looks now. For any thread, and for signal handlers."""
        self._bell.wake()

    def run(self) -> None:
        """Returns after `stop`, or when a burst or `max_timeouts` is over. No failure of a server ends it.

        Raises:
            ConfigError: the database allows too few connections for any handler.
        """
        with stopping_on_signals(self):
            if open_connection(self.using):
                self._fit_to_server()
            executor = make_executor(self.using, self.concurrency, self._only)
            dispatch = Dispatch(
                executor, self._sources, self.using, clocks=self._clocks, appetite=self._appetite, wake=self.wake
            )
            background = self._new_background()
            threads = self._new_threads(dispatch, background)
            try:
                for thread in threads:
                    thread.start()
                self._bell.start()
                worker_started.send_robust(type(self), worker=self)
                self._try(lambda: self._prepare(background))
                while not self._stopping:
                    self._wait(self._try(lambda: self._pass(dispatch)) or 0)
            finally:
                self._end(dispatch, executor, threads)

    def _fit(self, limit: Limit | None) -> None:
        """Run as many handler threads as `limit` leaves connections for, and log a warning if that is fewer."""
        wanted = self.concurrency
        if limit is not None and get_settings().executor is None:  # another executor has connections of its own
            self.concurrency = limit.threads(wanted)
        self._appetite = Appetite(self.concurrency)
        if limit is not None and self.concurrency < wanted:
            logger.warning(
                "%s This worker runs %d of them. Raise the limit, or lower CONCURRENCY.",
                limit.shortage(wanted),
                self.concurrency,
                extra={"event": "too_few_connections"},
            )

    def _fit_to_server(self) -> None:
        if pool_limit(self.using) is not None:
            return
        try:
            limit = server_limit(self.using)
        except DatabaseError as error:
            logger.debug("The server did not say how many connections it allows: %s", error)
        else:
            self._fit(limit)

    def _prepare(self, background: Background) -> None:
        self._clocks.ask_database()
        if self._only is not None:
            warn_of_unknown(self._only, self.using)
        if self._burst:
            background.sync()
            background.sweep_everything()

    def _pass(self, dispatch: Dispatch) -> float:
        """Settle what has ended, take what is due, hand it out; returns for how long there is nothing to do."""
        self._passed_at = time.monotonic()
        dispatch.collect()
        dispatch.give_back(held_for=third_of_a_lease())
        self._sources.flush()
        self._serve_found_queues()
        if self._outage.seconds_left:
            return self._outage.seconds_left
        if dispatch.refused_for:
            return dispatch.refused_for
        left = self._left(dispatch)
        if not left:
            return LONGEST_WAIT_SECONDS
        room = min(left, self._appetite.room(dispatch.held))
        self._outage.check()
        taken = self._sources.take(room, dispatch.held_by_policy, left)
        self._hand_out(dispatch, taken)
        self._outage.over(was_idle=not taken.deliveries)
        if self._burst and not taken.deliveries and taken.wait_seconds and not dispatch.held:
            return self._look_for_the_end(dispatch, self._burst, room)
        return taken.wait_seconds

    def _left(self, dispatch: Dispatch) -> int:
        """How many more may be taken before `max_timeouts` is reached."""
        if self._max_timeouts is None:
            return sys.maxsize
        left = self._max_timeouts - dispatch.worked_on
        if left <= 0:
            self._stopping = True
        return max(0, left - dispatch.held)

    def _hand_out(self, dispatch: Dispatch, taken: Taken) -> None:
        if not taken.deliveries:
            return
        check_connections(idle_seconds=time.monotonic() - self._database_used_at)
        self._database_used_at = time.monotonic()
        try:
            dispatch.hand_out(taken.deliveries)
        except Exception:
            dispatch.put_back(taken.deliveries)
            raise

    def _look_for_the_end(self, dispatch: Dispatch, burst: Burst, room: int) -> float:
        """Ends a burst if the ledger agrees that nothing is due."""
        taken = self._sources.look_into_ledger(room)
        self._hand_out(dispatch, taken)
        if taken.deliveries:
            return 0.0
        self._stopping = self._stopping or burst.is_over(dispatch.worked_on)
        return LOOK_SECONDS

    def _try(self, step: Any) -> Any:
        """What `step` returns; None after a failure, a server's or one of ours: it is noted, and the worker lives."""
        try:
            return step()
        except EngineError as error:
            self._link.failed(error)
        except Exception as error:  # noqa: BLE001
            self._outage.failed(error)
        finally:
            check_connections()
        return None

    def _wait(self, seconds: float) -> None:
        if seconds > 0 and not self._stopping and self._bell.wait(seconds):
            self._sources.look_now()

    def _end(self, dispatch: Dispatch, executor: Executor, threads: Sequence[PeriodicThread]) -> None:
        """The order of stopping: first what others can take over, then what only we can finish, then our own tools.

        The leases are kept until the last handler is through: losing one would have a colleague fire what we fire.
        """
        keeper, *others = threads
        for thread in others:
            thread.stop()
        dispatch.collect()
        dispatch.give_back()
        self._try(self._sources.flush)
        while dispatch.held and not self._hard:
            self._bell.wait(LONGEST_WAIT_SECONDS)
            if dispatch.collect():
                self._try(self._sources.flush)
        keeper.stop()
        if self._hard:
            self.abandoned = dispatch.abandon()
            self._try(self._sources.flush)
        try:
            executor.close(wait=not self._hard)
        except Exception as error:  # noqa: BLE001 - another's class, which must not keep the worker from ending
            logger.warning("The executor could not be closed: %s", error, extra={"event": "executor_failed"})
        self._bell.close()
        for thread in threads:
            if thread.is_alive():
                thread.join(JOIN_SECONDS)
        if self._link.engine is not None:
            self._link.engine.close()

    def _new_threads(self, dispatch: Dispatch, background: Background) -> list[PeriodicThread]:
        """Make the thread that keeps the leases, which ends last, and the others. Each has one connection."""
        quick = PeriodicThread("quick-jobs")
        quick.jobs.append(lease_keeper(self._sources, dispatch, self.using))
        if self._burst:
            return [quick]
        slow = PeriodicThread("slow-jobs")
        quick.jobs += [self._new_heartbeat(dispatch).job(), *background.quick_jobs(quick.run_urgent)]
        slow.jobs += background.slow_jobs(slow.run_urgent)
        return [quick, slow]

    def _new_heartbeat(self, dispatch: Dispatch) -> Heartbeat:
        return Heartbeat(
            self.using,
            queues=self._only,
            concurrency=self.concurrency,
            link=self._link,
            passed_at=lambda: self._passed_at,
            held=lambda: dispatch.held,
        )

    def _new_background(self) -> Background:
        serve = self._found_queues.put if self._only is None else None
        return Background(self._link, self.using, self._clocks, serve=serve, known_queues=self.queues, wake=self.wake)

    def _serve_found_queues(self) -> None:
        while not self._found_queues.empty():
            self.queues += self._found_queues.get()
            self._sources.serve(self.queues)
            former, self._bell = self._bell, self._new_bell()
            self._bell.start()
            former.close()
            self._bell.wake()  # whoever rang the former one meanwhile is heard

    def _new_bell(self) -> Wakeup:
        engine = self._link.engine
        # Without channels it is a bell that only this process rings.
        return Wakeup(cast("Any", None), ()) if engine is None else engine.wakeup(self.queues)
