"""What this process remembers while it fires: backoff, suspects that run alone, and what it has logged.

Losing it costs time only.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from django_delayq.backoff import LogInterval
from django_delayq.times import clock

if TYPE_CHECKING:
    from django_delayq.firing.works import RunningWork
    from django_delayq.models import Timeout

logger = logging.getLogger("django_delayq.firing")

FIRST_BACKOFF_SECONDS: Final = 0.1
"""A lock of a web request is mostly over by then; without a pause a worker would ask in a loop."""
LOCKED_MAX_SECONDS: Final = 5.0
"""The longest backoff for an object that another transaction has locked, and the longest wait at the gate. For so long
the timeouts of one value of `batch_by` wait for one of them: most requests and firings have ended by then."""
TRANSIENT_MAX_SECONDS: Final = 60.0
"""The longest backoff after a transient database error: the handler may have run unnecessarily."""
MISFIT_MAX_SECONDS: Final = 5.0
"""The same if the tables lack a column that this process expects: a worker of another release may fire the timeout."""
LONG_WAIT_SECONDS: Final = 30.0
"""A longer wait is logged: a lock that is never released would otherwise stop timeouts unseen."""
ANSWER_SECONDS: Final = 30.0
"""How long an answer of `confirm` is good. Later the customer may have paid, and the answer would be another one."""
_MAX_BACKOFFS: Final = 10_000
"""A worker beside a table that is locked for hours would otherwise keep a million of them in memory."""


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
        return timedelta(seconds=base * random.uniform(0.5, 1.5))

    def waited(self, using: str, ids: Iterable[int]) -> float:
        """Return for how many seconds the first of these timeouts has waited; 0: none has."""
        with self._lock:
            found = [self._waiting[using, each].since for each in ids if (using, each) in self._waiting]
        return time.monotonic() - min(found) if found else 0.0

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


class Gate:
    """Shared by works, except that a suspect has it for itself.

    A suspect takes its turn before it waits for those inside, and keeps it until it has run: others do not enter
    meanwhile, so that a busy process lets a suspect in, too.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._inside = 0

    @contextmanager
    def entered(self, *, alone: bool) -> Iterator[bool]:
        """Yield whether the work may run now, beside others or `alone`; False: it did not get in for too long."""
        if not self._turn.acquire(timeout=LOCKED_MAX_SECONDS):
            yield False
        elif alone:
            try:
                with self._changed:
                    is_alone = self._changed.wait_for(lambda: not self._inside, LOCKED_MAX_SECONDS)
                yield is_alone
            finally:
                self._turn.release()
        else:
            with self._changed:
                self._inside += 1
            self._turn.release()
            try:
                yield True
            finally:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()


class FiringState:
    """The state of firing in this process, shared by all of its threads.

    Attributes:
        backoff: how long timeouts wait that could not be fired.
        gate: where works wait while a suspect runs alone.
        running: the running work of each thread, by thread id.
        answers: when `confirm` has let an attempt begin, by database, idempotency key and failed attempts.
        brake_counts: how many firings the brake of a policy had counted at the end, by label.
        abandoned: the threads whose handlers took too long and have not ended.
        database_ahead: how far the database clock was ahead of the clock of this process when it was last read.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Return to the state of a new process. For tests."""
        self.backoff = TimeoutBackoff()
        self.gate = Gate()
        self.running: dict[int, RunningWork] = {}
        self.abandoned: list[threading.Thread] = []
        self.answers: dict[tuple[str, str, int], float] = {}
        self.database_ahead = timedelta(0)
        self.forget_policies()

    def forget_policies(self) -> None:
        """Forget what firings have shown of each policy. For tests, each of which has policies that have not fired."""
        self.brake_counts: dict[str, int] = {}
        self._log_interval = LogInterval()
        """Of slow handlers of a policy, and of the tracebacks of one kind of exception of its handlers."""

    @property
    def current(self) -> RunningWork | None:
        """What this thread runs; None: nothing."""
        return self.running.get(threading.get_ident())

    def is_time_to_log(self, key: Hashable) -> bool:
        """Return whether the last True for `key` was a minute ago, or there was none."""
        return self._log_interval.is_over(key)

    def note_answer(self, using: str, row: Timeout) -> None:
        """Note that `confirm` lets `row` fire, and forget answers that are not good any more."""
        now = time.monotonic()
        for each in [each for each, at in list(self.answers.items()) if now - at >= ANSWER_SECONDS]:
            self.answers.pop(each, None)
        self.answers[using, row.idempotency_key, row.attempts] = now

    def has_answer(self, using: str, row: Timeout) -> bool:
        """Return whether `confirm` lets `row` fire, by an answer that is still good."""
        answered_at = self.answers.get((using, row.idempotency_key, row.attempts), -math.inf)
        return time.monotonic() - answered_at < ANSWER_SECONDS

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


firing_state = FiringState()
