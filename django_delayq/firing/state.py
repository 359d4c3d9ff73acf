"""What this process learns while it fires: group sizes, backoff.

Losing it costs time only.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from django_delayq import clock

if TYPE_CHECKING:
    from django_delayq.firing.work import RunningWork

logger = logging.getLogger("django_delayq.firing")

MAX_GROUP: Final = 50
LOCK_SECONDS: Final = 0.02
MAX_LOCK_SECONDS: Final = 0.1
"""A group should hold its locks no longer than `LOCK_SECONDS`; on a busy machine, where even the transaction itself is
slow, no longer than `MAX_HANDLERS_PER_OVERHEAD` times its overhead, and than this."""
WORK_SECONDS: Final = 0.2
"""How long one piece of work should take, so that threads share a backlog and the worker can stop soon."""
_WEIGHT: Final = 0.4
_SLOWER_WEIGHT: Final = 0.7
"""Of the latest measurement: groups shrink at once where handlers become slow, and recover within a few groups."""
MAX_HANDLERS_PER_OVERHEAD: Final = 12
MAX_IDLE_OF_BUSY: Final = 0.5
MIN_IDLE_OF_WAITING: Final = 0.8
MAX_FOREIGN_SHARE: Final = 0.8
CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_FAILURE_WEIGHT: Final = 0.1
_ACCEPTED_FAILURE_RATE: Final = 0.3
"""The rate of groups that may be rolled back because a member raises."""

FIRST_BACKOFF_SECONDS: Final = 0.1
LOCKED_MAX_SECONDS: Final = 5.0
"""The longest backoff for an object that another transaction has locked."""
LOCKED_INTERVAL_SECONDS: Final = 2.5
"""Backoffs of `LOCKED_MAX_SECONDS` end at multiples of this interval."""
TRANSIENT_MAX_SECONDS: Final = 60.0
"""The longest backoff after a transient database error: the handler may have run unnecessarily."""
MISFIT_MAX_SECONDS: Final = 5.0
"""The same if the tables lack a column that this process expects: a worker of another release may fire the timeout."""
LONG_WAIT_SECONDS: Final = 30.0
_MAX_BACKOFFS: Final = 10_000

LOG_INTERVAL_SECONDS: Final = 60.0
"""How often a slow handler of one policy is logged, and the traceback of one kind of exception of its handlers."""


class Cost(NamedTuple):
    """What one transaction cost, in seconds."""

    overhead: float = 0.0
    """Wall time until its first handler began."""
    handlers: float = 0.0
    """Wall time of its handlers."""
    cpu: float = 0.0
    """CPU time of its handlers."""
    database: float = 0.0
    """Wall time of the statements of its handlers."""


@dataclass(slots=True)
class GroupSize:
    """How many timeouts of one policy share a transaction: many if its handlers are quick and rarely fail.

    All members of a group stay locked until it commits, and all run again if one of them raises.
    """

    seconds: float | None = None
    """What one handler took recently; None: none has run."""
    overhead: float = 0.0
    """What a transaction took recently until its first handler began."""
    idle_share: float = 0.0
    """The part of their time in which handlers recently used no CPU: they waited, for a server or for the GIL."""
    foreign_share: float = 0.0
    """The part in which they waited for something else than the database, which also serves the transaction itself."""
    failure_rate: float = 0.0
    proven: int = 1
    """Four times the size of the largest group that committed, which the next group may have."""
    uncalled_size: int = 0
    """How many may be checked in one transaction: up to four times the last group, in which no handler was called."""
    alone_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def size(self) -> int:
        """Return how many to fire in one transaction.

        On a busy machine, or where threads wait for each other, handlers and the transaction itself become slower
        alike. Groups would collapse there if they were bounded by a fixed time. It stays fixed for handlers that wait
        for something else than the database.
        """
        if self.is_alone or self.seconds is None:
            return 1
        seconds = LOCK_SECONDS
        if self.foreign_share <= MAX_FOREIGN_SHARE:
            seconds = min(max(seconds, MAX_HANDLERS_PER_OVERHEAD * self.overhead), MAX_LOCK_SECONDS)
        by_time = seconds / max(self.seconds, 1e-6)
        by_failures = _ACCEPTED_FAILURE_RATE / max(self.failure_rate, 1e-6)
        return max(1, min(MAX_GROUP, int(by_time), int(by_failures), self.proven))

    def work_size(self) -> int:
        """Return how many to pass to one thread at once."""
        if self.seconds is None:
            return MAX_GROUP
        return max(1, min(MAX_GROUP, int(WORK_SECONDS / max(self.seconds, 1e-6))))

    @property
    def is_alone(self) -> bool:
        """Return whether each timeout is fired in a transaction of its own for now."""
        return time.monotonic() < self.alone_until

    @property
    def threads(self) -> float:
        """Return how many threads of one process may run its handlers at once.

        Handlers that use the CPU wait for each other's GIL, so two are enough: one runs while the transaction of the
        other waits for the database. Those that mostly wait do not, and nothing is known of those that have not run
        yet. A part between the two may also come from threads that wait for each other.
        """
        if self.seconds is None or self.idle_share > MIN_IDLE_OF_WAITING:
            return math.inf
        return max(2, CORES) if self.idle_share > MAX_IDLE_OF_BUSY else 2

    def record_success(self, count: int, cost: Cost) -> None:
        """Note what a transaction with `count` handlers cost that committed."""
        with self._lock:
            self._record(cost.handlers / count, cost)
            self.failure_rate *= (1 - _FAILURE_WEIGHT) ** min(count, MAX_GROUP)
            self.proven = max(self.proven, min(MAX_GROUP, 4 * count))

    def record_failure(self, count: int, cost: Cost) -> None:
        """Note what a transaction with `count` members cost of which a handler raised."""
        with self._lock:
            self._record(max(self.seconds or 0.0, cost.handlers / max(count, 1)), cost)
            self.failure_rate += _FAILURE_WEIGHT * (1 - self.failure_rate)

    def _record(self, each: float, cost: Cost) -> None:
        before = each if self.seconds is None else self.seconds
        self.seconds = before + (_SLOWER_WEIGHT if each > before else _WEIGHT) * (each - before)
        weight = _WEIGHT if self.overhead else 1.0
        self.overhead += weight * (cost.overhead - self.overhead)
        if cost.handlers:
            self.idle_share += weight * (max(0.0, 1 - cost.cpu / cost.handlers) - self.idle_share)
            foreign = 1 - (cost.cpu + cost.database) / cost.handlers
            self.foreign_share += weight * (max(0.0, foreign) - self.foreign_share)

    def fire_alone_for(self, seconds: float) -> None:
        """Fire each timeout in a transaction of its own for the next `seconds`."""
        with self._lock:
            self.alone_until = max(self.alone_until, time.monotonic() + seconds)


class _Waiting(NamedTuple):
    times: int
    since: float
    losses: int = 0


class TimeoutBackoff:
    """How long timeouts wait that could not be fired because of a lock or a transient error. Bounded in size."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._lock = threading.Lock()

    def next_wait(self, using: str, timeout_id: int, why: str, max_seconds: float) -> timedelta:
        """Return the next wait: 50 to 150 ms first, doubling up to `max_seconds`. Log a long one once a minute.

        Of many that wait for the same reason, such as a missing column, one is logged. The wait is random, so that two
        workers that deadlocked do not meet again.
        """
        now = time.monotonic()
        with self._lock:
            before = self._waiting.pop((using, timeout_id), _Waiting(0, now))
            if len(self._waiting) >= _MAX_BACKOFFS:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[using, timeout_id] = before._replace(times=before.times + 1)
        if now - before.since >= LONG_WAIT_SECONDS and firing_state.is_time_to_log(("waits", why)):
            words, extra = "Timeout %s has waited %.0f s to be fired: %s", {"timeout_id": timeout_id}
            logger.warning(words, timeout_id, now - before.since, why, extra={"event": "timeout_waits", **extra})
        base = min(FIRST_BACKOFF_SECONDS * 2 ** min(before.times, 20), max_seconds)
        if base == max_seconds == LOCKED_MAX_SECONDS:  # so that thousands of locked timeouts come back in few groups
            seconds = base * random.uniform(1.0, 1.5)
            return timedelta(seconds=seconds - (now + seconds) % LOCKED_INTERVAL_SECONDS)
        return timedelta(seconds=base * random.uniform(0.5, 1.5))

    def note_loss(self, using: str, timeout_id: int) -> int:
        """Note that its handler has lost the connection; return how often, since the timeout was last reset."""
        with self._lock:
            waiting = self._waiting.get((using, timeout_id), _Waiting(0, time.monotonic()))
            self._waiting[using, timeout_id] = waiting = waiting._replace(losses=waiting.losses + 1)
            return waiting.losses

    def reset(self, using: str, timeout_id: int) -> None:
        """Begin with the shortest wait again, because the timeout was fired or waits for another reason."""
        if self._waiting:
            with self._lock:
                self._waiting.pop((using, timeout_id), None)


class FiringState:
    """The state of firing in this process, shared by all of its threads.

    Attributes:
        backoff: how long timeouts wait that could not be fired.
        running: the running work of each thread, by thread id.
        brake_counts: how many firings the brake of a policy had counted at the end, by label.
        abandoned: the threads whose handlers took too long and have not ended.
        database_ahead: how far the database clock was ahead of the clock of this process when it was last read.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Return to the state of a new process. For tests."""
        self.backoff = TimeoutBackoff()
        self.running: dict[int, RunningWork] = {}
        self.abandoned: list[threading.Thread] = []
        self.database_ahead = timedelta(0)
        self.forget_policies()

    def forget_policies(self) -> None:
        """Forget what firings have shown of each policy. For tests, each of which has policies that have not fired."""
        self.brake_counts: dict[str, int] = {}
        self._logged_at: dict[Hashable, float] = {}
        self._group_sizes: dict[str, GroupSize] = {}

    @property
    def current(self) -> RunningWork | None:
        """What this thread runs; None: nothing."""
        return self.running.get(threading.get_ident())

    def is_time_to_log(self, key: Hashable) -> bool:
        """Return whether the last True for `key` was `LOG_INTERVAL_SECONDS` ago, or there was none."""
        now = time.monotonic()
        recent = {each: at for each, at in self._logged_at.items() if now - at < LOG_INTERVAL_SECONDS}
        self._logged_at = {key: now} | recent
        return key not in recent

    def note_database(self, now: datetime) -> None:
        """Note that the database clock has just shown `now`."""
        self.database_ahead = now - clock.now()

    def database_now(self) -> datetime:
        """Return an estimate of the database clock, for when the database does not answer."""
        return clock.now() + self.database_ahead

    @property
    def stuck_threads(self) -> int:
        """Return how many threads of this process still run a handler that took too long."""
        # In place: a new list would lack the threads that others abandon meanwhile.
        for thread in [each for each in self.abandoned if not each.is_alive()]:
            with suppress(ValueError):  # removed by another thread
                self.abandoned.remove(thread)
        return len(self.abandoned)

    def group_size(self, label: str) -> GroupSize:
        return self._group_sizes.get(label) or self._group_sizes.setdefault(label, GroupSize())


firing_state = FiringState()
