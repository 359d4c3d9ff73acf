"""Executors run works: in threads of the worker's process, or as the class named by `DELAYQ["EXECUTOR"]` does."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from itertools import islice
from math import inf
from typing import Final, Protocol, TypeAlias

from django.db import connections
from django.utils.module_loading import import_string

from django_delayq.conf import ConfigError, get_settings
from django_delayq.firing.running import run_each
from django_delayq.firing.state import firing_state
from django_delayq.firing.time_limits import SLOW_SECONDS, log_long_runs
from django_delayq.firing.works import AHEAD_SECONDS, Report, Work
from django_delayq.ledger.db_connections import check_connections, open_connection
from django_delayq.ledger.error_texts import shown
from django_delayq.ledger.left_open import refuse_without_autocommit
from django_delayq.logs import DELAY_SECONDS
from django_delayq.policy.policies import registry

logger = logging.getLogger("django_delayq.worker")

Done: TypeAlias = Callable[[Work, Report], None]
"""Accepts the report on a work, in any thread. A late or second report does no harm."""

WEIGHT: Final = 0.2
"""Of the newest work in the average. With more, one quick work would give a slow policy the last free thread."""
PREFETCH_SECONDS: Final = 0.5
"""How much work a worker holds in advance: less would leave threads idle during a slow query for the next."""
OPEN_AFTER_SECONDS: Final = 1.0
"""If the server has too few connections, sweep and heartbeat must have theirs before the handlers take the rest."""


class Executor(Protocol):
    """Run works, several at a time. Made as `cls(using, concurrency)` in the worker's main thread.

    `docs/executors.md` describes how to write one.
    """

    keeps_leases: bool = False
    """True: every work runs in this process and is answered, so its lease is extended for as long as that takes.
    False: a work without an answer is delivered again after the setting `LEASE`."""
    early_seconds: float = 0.0
    """How long before its deadline a work may be submitted, by an executor that calls `run` in this process: `run`
    then waits until `work.begin_at`."""
    prefetch_seconds: float = PREFETCH_SECONDS
    """The worker submits as much as is reported within this time, and so ever less if each report takes longer. An
    executor with a delay of its own, however little it runs, needs more than that delay."""

    def submit(self, work: Work, done: Done) -> None:
        """Have `work` run by `firing.run`, and `done` called with it and the report. Return at once.

        An exception refuses the work: it is delivered again soon, and no attempt is counted.
        """

    def withdraw(self) -> list[Work]:
        """Return the works that have not begun. They are never run, and `done` is not called for them."""
        return []

    def close(self, *, wait: bool = True) -> None:
        """Accept no more works. With `wait`, return when all submitted works that were not withdrawn have run."""


class WorkQueue:
    """Works that wait for a thread. The next work is of the policy with the fewest running works.

    The last free thread is reserved for policies that are not slow, so that slow handlers, of one policy or of several,
    never occupy all threads while a quick one waits. Within a policy the first work comes first; between policies with
    equally many running works, the one that has waited longer.

    Args:
        threads: how many threads get works.
        reserves_one: whether the last free thread is reserved: not if only one policy is served. Never with one thread.
    """

    def __init__(self, threads: int, reserves_one: Callable[[], bool]) -> None:
        self._threads = threads
        self._reserves_one = reserves_one
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[tuple[Work, Done]]] = {}
        self._running: dict[str, dict[int, float]] = {}
        self._seconds: dict[str, float] = {}
        self._is_closed = False

    def put(self, work: Work, done: Done) -> None:
        """Append a work."""
        with self._changed:
            self._waiting.setdefault(work.policy, deque()).append((work, done))
            self._changed.notify()

    def get(self) -> tuple[Work, Done] | None:
        """Wait for the next work and return it. It runs until `finished`. None: closed, and nothing is left."""
        with self._changed:
            while (policy := self._next_policy()) is None:
                if self._is_closed and not self._waiting:
                    return None
                self._changed.wait()
            return self._begin(policy)

    def get_another(self, work: Work, done: Done) -> Work | None:
        """Note that `work` has run, and return the next one if it can begin now and be reported with that.

        Only of a backlog, and of a policy that is known to be quick: until the report all count as in flight.
        """
        with self._changed:
            self.finished(work)  # first: the thread counts as free when it is decided who may have it
            policy, is_backlog = self._next_policy(), sum(map(len, self._waiting.values())) > self._threads
            if policy is not None and is_backlog and self._seconds.get(policy, inf) < DELAY_SECONDS:
                other, its_done = self._waiting[policy][0]
                is_plain = not (work.suspect or other.suspect or other.share) and other.begin_by == inf
                if is_plain and other.begin_at <= time.monotonic() and its_done == done:
                    return self._begin(policy)[0]
            return None

    def _begin(self, policy: str) -> tuple[Work, Done]:
        rest = self._waiting.pop(policy)
        item = rest.popleft()
        if rest:
            self._waiting[policy] = rest  # at the end, behind the other policies
        self._running.setdefault(policy, {})[id(item[0])] = time.monotonic()
        return item

    def _next_policy(self) -> str | None:
        """Return the policy whose work comes next; None: none may run now."""
        free = self._threads - sum(map(len, self._running.values()))
        keeps_last = self._threads > 1 and free == 1 and not self._is_closed and self._reserves_one()
        waiting = [policy for policy in self._waiting if not (keeps_last and self._may_be_slow(policy))]
        return min(waiting, key=lambda policy: len(self._running.get(policy, ())), default=None)

    def _may_be_slow(self, policy: str) -> bool:
        """Return whether `policy` must leave the last free thread to others.

        A policy that has not run here yet may have one thread, and no more until it is known how long that takes.
        """
        running, seconds = self._running.get(policy, {}), self._seconds.get(policy)
        if any(time.monotonic() - began > SLOW_SECONDS for began in running.values()):
            return True
        return bool(running) if seconds is None else seconds > SLOW_SECONDS

    def finished(self, work: Work) -> None:
        """Note that `work` has run. One slow work makes its policy slow; a dozen quick ones make it quick again."""
        with self._changed:
            running = self._running.get(work.policy, {})
            if id(work) not in running:  # it is noted already
                return
            seconds = time.monotonic() - running.pop(id(work))
            before = self._seconds.get(work.policy, seconds)
            self._seconds[work.policy] = max(seconds, before + WEIGHT * (seconds - before))
            if not running:
                del self._running[work.policy]
            if self._waiting:
                self._changed.notify()  # a waiting thread may run the policy that is known to be quick now

    @property
    def is_idle(self) -> bool:
        """Return whether no work waits or runs."""
        with self._changed:
            return not self._waiting and not self._running

    def withdraw(self) -> list[Work]:
        """Remove and return the waiting works."""
        with self._changed:
            withdrawn = [work for waiting in self._waiting.values() for work, _ in waiting]
            self._waiting.clear()
            return withdrawn

    def close(self) -> None:
        """Let `get` return None once nothing waits, and reserve no thread any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class ThreadExecutor(Executor):
    """Daemon threads, each with a database connection that is open before the first deadline.

    They are daemons so that a second signal to stop need not wait for a handler that hangs. One more thread, without a
    connection, logs handlers that run longer than a second.

    Args:
        using: the database.
        concurrency: how many threads.
        queues: which are served; None: all.
    """

    keeps_leases = True
    early_seconds = AHEAD_SECONDS

    def __init__(self, using: str, concurrency: int, queues: Collection[str] | None = None) -> None:
        self._using = using
        self._queues = queues
        self._broken_at = 0.0
        self._works = WorkQueue(concurrency, self._serves_several)
        self._closed = threading.Event()
        self._has_works = threading.Event()
        names = [f"delayq-handler-{number}" for number in range(1, concurrency + 1)]
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        for thread in (*self._threads, threading.Thread(target=self._log_long_runs, name="delayq-watch", daemon=True)):
            thread.start()

    def submit(self, work: Work, done: Done) -> None:
        self._works.put(work, done)
        if not self._has_works.is_set():  # to set it again would only lock
            self._has_works.set()

    def withdraw(self) -> list[Work]:
        return self._works.withdraw()

    def close(self, *, wait: bool = True) -> None:
        self._works.close()
        self._closed.set()
        self._has_works.set()
        for thread in self._threads if wait else ():
            thread.join()

    def _serves_several(self) -> bool:
        served = (policy for policy in registry if self._queues is None or policy.queue in self._queues)
        return len(list(islice(served, 2))) > 1

    def _log_long_runs(self) -> None:
        lease = get_settings().lease.total_seconds()
        while self._has_works.wait() and not self._closed.wait(min(SLOW_SECONDS / 2, lease / 3)):
            log_long_runs(lease, len(self._threads))
            self._has_works.clear()
            if not self._works.is_idle:  # asked after `clear`: a work that comes now sets it again
                self._has_works.set()

    def _serve(self) -> None:
        self._has_works.wait(OPEN_AFTER_SECONDS)
        open_connection(self._using)
        used_at = time.monotonic()
        try:
            while (item := self._works.get()) is not None:
                works, done = [item[0]], item[1]
                # If one connection broke, most likely all did: the others are tested before they are used.
                is_suspect = self._broken_at >= used_at
                check_connections(idle_seconds=inf if is_suspect else time.monotonic() - used_at)
                report = self._run(works, done)
                used_at = time.monotonic()
                check_connections()
                if connections[self._using].connection is None:
                    self._broken_at = used_at
                self._works.finished(works[-1])
                for work in works:
                    done(work, report)
        finally:
            connections.close_all()

    def _run(self, works: list[Work], done: Done) -> Report:
        """Run the only one of `works`, and append those that were waiting and have run after it.

        So a backlog costs one log call and one report for many. None is taken before it begins: if this thread hangs,
        others run it.
        """
        end = time.monotonic() + DELAY_SECONDS

        def begun() -> Iterator[Work]:
            yield works[0]
            while time.monotonic() < end and (other := self._works.get_another(works[-1], done)) is not None:
                works.append(other)
                yield other

        try:
            return run_each(begun(), self._using)
        except BaseException as error:  # `run` raises nothing else, but a thread that ends is not replaced
            words = "A firing was interrupted; its timeouts are retried"
            logger.error(words, exc_info=shown(error), extra={"event": "interrupted"})
            ids, again = [id for each in works for id in each.ids], firing_state.database_now() + timedelta(seconds=1)
            return Report(again=dict.fromkeys(ids, again))


def make_executor(using: str, concurrency: int, queues: Collection[str] | None = None) -> Executor:
    """Return the executor that the settings name; `queues` None: the worker serves all. Raises ConfigError."""
    refuse_without_autocommit(using)
    path = get_settings().executor
    if path is None:
        return ThreadExecutor(using, concurrency, queues)
    try:
        executor: Executor = import_string(path)(using, concurrency)
    except Exception as error:
        problem = "imported" if isinstance(error, ImportError) else f"made: {type(error).__name__}"
        raise ConfigError(f"DELAYQ['EXECUTOR'] names {path!r}, which cannot be {problem}: {error}") from error
    return executor
