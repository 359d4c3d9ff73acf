"""The difference between the clocks of Redis and the database.

Redis wakes a worker by its own clock, but only the database clock decides which timeouts are due. Where the two
differ, entries would be early or late. So a worker measures both, and sends each deadline to Redis by the clock of
Redis. An error of some milliseconds costs an extra check or a little delay, never correctness.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from django.db import connections

from django_delayq import clock
from django_delayq.clock import database_now
from django_delayq.dialects import dialect_of
from django_delayq.ledger.outbox import due_ms_of

WINDOW_SECONDS: Final = 60.0
TOLERATED_MS: Final = 5.0
"""A smaller difference counts as none: it is within the error of the measurement."""
MIN_SAMPLES: Final = 3
QUERIES: Final = 3
STEP_MS: Final = 1000.0
"""A clock that falls back by more than this, and by more than an answer can be late, was set."""
REDIS_LATE_MS: Final = 2000.0
"""A worker waits a second for an answer, and may read it a second later."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class ClockSkew:
    """How far the clock of Redis is ahead of the database clock. Thread-safe.

    Both are compared with the steady clock of this process. SQLite has no server, so its clock is that of the process.
    """

    def __init__(self, using: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._using = using
        self._is_ours = not dialect_of(connections[using]).server_time
        self._monotonic = monotonic
        self._database = _Offset(monotonic)
        self._redis = _Offset(monotonic)

    def ask_database(self) -> datetime:
        """Return the time of the database.

        While its clock is not known, or may have been set, it is queried several times: one answer will be fast.
        """
        now = clock.now()
        for _ in range(QUERIES):
            asked = self._monotonic()
            now = database_now(self._using)
            self._database.note(_ms(now), late_ms=1000 * (self._monotonic() - asked))
            if self._database.is_steady:
                break
        return now

    def note_database(self, now: datetime) -> None:
        """Note that the database clock showed `now`, at this time or earlier."""
        self._database.note(_ms(now))

    def note_answer(self, now: datetime, asked_at: float) -> None:
        """Note that a query, begun at the steady time `asked_at`, has just returned `now` as the database's time.

        Query it again while its clock is not known, or may have been set. Raises the database's errors.
        """
        self._database.note(_ms(now), late_ms=1000 * (self._monotonic() - asked_at))
        if not self._database.is_steady:
            self.ask_database()

    def note_redis(self, now_ms: int) -> None:
        """Note that the clock of Redis has just shown `now_ms`."""
        self._redis.note(float(now_ms), late_ms=REDIS_LATE_MS)

    def redis_ms(self, due_at: datetime) -> int:
        """Return what the clock of Redis will show when the database clock shows `due_at`."""
        return due_ms_of(due_at + timedelta(milliseconds=self.redis_ahead_ms()))

    def now(self) -> datetime:
        """Return an estimate of the database clock; the clock of this process while it is not measured."""
        offset = self._database.best()
        if offset is None or self._is_ours:
            return clock.now()
        now = _EPOCH + timedelta(milliseconds=offset + 1000 * self._monotonic())
        return clock.fitting(now)

    def redis_ahead_ms(self) -> float:
        """Return by how many milliseconds Redis is ahead of the database; 0 if that is little, or not measured."""
        redis, database = self._redis.best(), self._database.best()
        if self._is_ours:
            database = _ms(clock.now()) - 1000 * self._monotonic()
        if redis is None or database is None or abs(redis - database) <= TOLERATED_MS:
            return 0.0
        return redis - database


def _ms(time: datetime) -> float:
    return (clock.aware(time) - _EPOCH) / timedelta(milliseconds=1)


class _Offset:
    """How far a clock is ahead of the steady clock: the best of the latest samples.

    An answer arrives after it was true, so each sample is too low, and the highest one is the nearest.
    Samples are kept for two windows, so that a clock which was set back a little is followed after a minute or two.
    One that was set back by more than its answers can be late is followed after a few samples.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._began = monotonic()
        self._present = self._last = -math.inf
        self._seen = self._set_back = 0

    def note(self, ms: float, late_ms: float | None = None) -> None:
        """Note that the clock showed `ms`, at most `late_ms` ago; None: at an unknown time."""
        now = self._monotonic()
        with self._lock:
            if late_ms is not None:
                is_back = ms - 1000 * now + late_ms + STEP_MS < max(self._present, self._last)
                self._set_back = self._set_back + 1 if is_back else 0
            if self._set_back >= MIN_SAMPLES:
                self._began, self._set_back = now, 0
                self._present = self._last = -math.inf
            if now - self._began > WINDOW_SECONDS:
                self._began, self._last, self._present = now, self._present, -math.inf
            self._present = max(self._present, ms - 1000 * now)
            self._seen += 1

    @property
    def is_steady(self) -> bool:
        """Return whether the clock is known, and the latest sample fits."""
        return self._seen >= MIN_SAMPLES and not self._set_back

    def best(self) -> float | None:
        with self._lock:
            return None if self._seen < MIN_SAMPLES else max(self._present, self._last)
