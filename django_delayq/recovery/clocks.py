"""Two servers, two clocks: Redis wakes us by its own, and only the database's says what is due.

Where the two differ, an entry that is due by the one is early or late by the other. So a worker keeps an eye on both,
and tells Redis each moment as Redis will see it. Wrong by some milliseconds it costs a look or a little delay; never
right enough to decide anything, and never asked to.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import connections
from django.utils import timezone

from django_delayq import clock
from django_delayq.clock import database_now
from django_delayq.dialects import dialect_of
from django_delayq.ledger.outbox import due_ms_of

WINDOW_SECONDS: Final = 60.0
TOLERATED_MS: Final = 5.0
"""Two clocks of one data centre differ by this much, and measuring them is no better: treated as equal."""
ENOUGH: Final = 3
QUESTIONS: Final = 3
STEP_MS: Final = 1000.0
"""A clock that falls back by more than this, and by more than an answer can be late, was set."""
REDIS_LATE_MS: Final = 2000.0
"""A worker waits a second for an answer, and may be kept from reading it for another."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Clocks:
    """How far Redis's clock is ahead of the database's. Threads share an instance.

    Args:
        using: the database. SQLite has no server, so its clock is ours, and known exactly.
        monotonic: our steady clock.
    """

    def __init__(self, using: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._using = using
        self._is_ours = not dialect_of(connections[using]).server_time
        self._monotonic = monotonic
        self._database = _Offset(monotonic)
        self._redis = _Offset(monotonic)

    def ask_database(self) -> datetime:
        """The database's moment, asked for a few times in a row: one of the answers will have come quickly."""
        for _ in range(QUESTIONS - 1):
            self._ask()
        return self._ask()

    def _ask(self) -> datetime:
        asked = self._monotonic()
        moment = database_now(self._using)
        self._database.saw(_exact_ms(moment), late_ms=1000 * (self._monotonic() - asked))
        return moment

    def saw_database(self, moment: datetime) -> None:
        """The database said that it is `moment`, just now or a while ago."""
        self._database.saw(_exact_ms(moment))

    def saw_redis(self, now_ms: int) -> None:
        """Redis has just said that it is `now_ms`."""
        self._redis.saw(float(now_ms), late_ms=REDIS_LATE_MS)

    def redis_ms(self, moment: datetime) -> int:
        """What Redis's clock will say when the database's says `moment`."""
        return due_ms_of(moment + timedelta(milliseconds=self.redis_ahead_ms()))

    def now(self) -> datetime:
        """About what the database's clock says now; ours, while that is not known."""
        offset = self._database.best()
        if offset is None or self._is_ours:
            return clock.now()
        moment = _EPOCH + timedelta(milliseconds=offset + 1000 * self._monotonic())
        return moment if settings.USE_TZ else timezone.make_naive(moment)

    def redis_ahead_ms(self) -> float:
        """Milliseconds by which Redis is ahead of the database; 0 if next to nothing, or not known yet."""
        redis, database = self._redis.best(), self._database_offset()
        if redis is None or database is None or abs(redis - database) <= TOLERATED_MS:
            return 0.0
        return redis - database

    def _database_offset(self) -> float | None:
        if self._is_ours:
            return _exact_ms(clock.now()) - 1000 * self._monotonic()
        return self._database.best()


def _exact_ms(moment: datetime) -> float:
    aware = moment if timezone.is_aware(moment) else timezone.make_aware(moment)
    return (aware - _EPOCH) / timedelta(milliseconds=1)


class _Offset:
    """How far a clock is ahead of our steady one: the best of what was seen lately.

    An answer is heard after it was true, so each makes the clock look slow, and the highest is the nearest. Of two
    windows, the present and the last, so that a clock that was set back a little is believed after a minute or two;
    one that was set back by more than its answers can be late is believed after a few of them.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._began = monotonic()
        self._present = self._last = -math.inf
        self._seen = self._set_back = 0

    def saw(self, ms: float, late_ms: float | None = None) -> None:
        """The clock said `ms`, `late_ms` ago at most; None: nobody knows how long ago."""
        now = self._monotonic()
        with self._lock:
            if late_ms is not None:
                is_back = ms - 1000 * now + late_ms + STEP_MS < max(self._present, self._last)
                self._set_back = self._set_back + 1 if is_back else 0
            if self._set_back >= ENOUGH:
                self._began, self._set_back = now, 0
                self._present = self._last = -math.inf
            if now - self._began > WINDOW_SECONDS:
                self._began, self._last, self._present = now, self._present, -math.inf
            self._present = max(self._present, ms - 1000 * now)
            self._seen += 1

    def best(self) -> float | None:
        with self._lock:
            return None if self._seen < ENOUGH else max(self._present, self._last)
