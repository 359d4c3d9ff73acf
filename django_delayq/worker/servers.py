"""Find out in which state the servers of a worker are.

It is whether Redis and the database work, and how far their clocks differ.

Redis wakes a worker by its own clock, but only the database clock decides which timeouts are due. Where the two differ,
entries would be early or late. So a worker measures both, and sends each deadline to Redis by the clock of Redis. An
error of some milliseconds costs an extra check or a little delay, never correctness.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

from django.db import Error as DatabaseError
from django.db import connections

from django_delayq.backoff import Backoff, StateLog
from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineError, EngineFull
from django_delayq.ledger.db_connections import check_connections, not_migrated
from django_delayq.ledger.error_texts import message_of, shown
from django_delayq.ledger.outbox import due_ms_of
from django_delayq.models import WorkerSeen
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.now import database_now
from django_delayq.times import clock

logger = logging.getLogger("django_delayq.worker")

ROOM_SECONDS: Final = 30.0
"""Redis counts as full until a sweep succeeds this long after a refusal: at its limit it refuses only some calls."""

WINDOW_SECONDS: Final = 60.0
"""How long the fastest answer counts: clocks drift, and a machine that slept must be measured again."""
TOLERATED_MS: Final = 5.0
"""A smaller difference counts as none: it is within the error of the measurement."""
MIN_SAMPLES: Final = 3
"""One answer may have been delayed, and two could both be: with fewer the clock would be corrected by chance."""
STEP_MS: Final = 1000.0
"""A clock that falls back by more than this, and by more than an answer can be late, was set."""
REDIS_LATE_MS: Final = 2000.0
"""A worker waits a second for an answer, and may read it a second later."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

REDIS_AWAY: Final = "Until it is back, due timeouts are read from the database"
"""What the log contains while Redis is not used, to which the doctor refers: plain lines have no names of events."""


class RedisHealth:
    """The worker's engine, and whether it may be used now. Thread-safe.

    While Redis is unavailable only `probe` calls it, with growing delays: a server that drops packets costs a timeout
    for each call.

    A Redis that is out of memory is still up. The worker must continue to take entries from it, or it would stay full.
    The timeouts that it has no room for are read from the ledger meanwhile.
    """

    def __init__(self, engine: Engine | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._full_at = -math.inf
        self._backoff = Backoff(jitter=0, steady_seconds=Backoff.longest, monotonic=monotonic)
        self._outages = StateLog(logger, "redis_away", "redis_back")
        self._shortages = StateLog(logger, "redis_full", "redis_has_room")

    @property
    def is_up(self) -> bool:
        """Return whether Redis may be used."""
        return self.engine is not None and not self._backoff.is_failing

    @property
    def is_full(self) -> bool:
        """Return whether due timeouts may be missing from Redis although it is up."""
        return self._shortages.is_failing

    @property
    def probe_seconds(self) -> float:
        """Return how long to wait before the next `probe`; infinite if none is needed."""
        return math.inf if self.is_up or self.engine is None else self._backoff.delay

    def probe_at_start(self, queues: Iterable[str]) -> None:
        """Probe Redis for these queues, so that the start shows whether the worker may use it.

        A ping would also succeed for a user that may not run scripts.
        """
        if self.engine is not None and self.is_up:
            try:
                self.probe(queues)
            except EngineError as error:
                self.failed(error)

    def failed(self, error: Exception, *, was_probe: bool = False) -> None:
        """Note an error of a call that Redis may refuse for lack of memory alone. Other errors are as in `lost`.

        After a probe, or a full sweep behind it, also double the delay before the next one.
        """
        if not isinstance(error, EngineFull):
            self.lost(error)
        else:
            self._full_at = self._monotonic()
            self._shortages.failed("%s. Timeouts that it has no room for are read from the database", error)
        if was_probe:
            with self._lock:
                self._backoff.failed()

    def lost(self, error: Exception) -> None:
        """Note that Redis is unavailable. It is not used until a probe succeeds."""
        with self._lock:
            if self.is_up:
                self._backoff.failed()
        self._outages.failed(f"%s. {REDIS_AWAY}", error)

    def probe(self, queues: Iterable[str]) -> None:
        """Check that Redis accepts for all these queues what a worker sends; raise EngineError if it does not.

        A ping is not enough: a replica, and a server that cannot save, answer it.
        """
        assert self.engine is not None
        self.engine.ping()
        for queue in self.engine.queues(queues):
            queue.probe()

    def recovered(self) -> None:
        """Note that Redis works, and contains the due timeouts again."""
        with self._lock:
            self._backoff.succeeded()
        self._outages.recovered("Redis is back, and wakes this worker again")

    def accepted(self) -> None:
        """Note that Redis has accepted everything that a sweep sent."""
        if self._monotonic() - self._full_at > ROOM_SECONDS:
            self._shortages.recovered("Redis has room again")


class DatabaseHealth:
    """Whether the passes of the main loop succeed. For one thread."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._backoff = Backoff()
        self._outages = StateLog(logger, "database_away", "database_back")
        self._bugs = StateLog(logger, "pass_failed", "pass_succeeded")
        self._failing_since = math.inf

    @property
    def seconds_left(self) -> float:
        """Return how long to wait before the next pass. 0: it may begin."""
        return self._backoff.seconds_left

    @property
    def failing_seconds(self) -> float:
        """Return for how long each pass has failed; 0 if the last one succeeded."""
        return max(0.0, time.monotonic() - self._failing_since)

    def failed(self, error: Exception) -> None:
        """Delay the next pass, log the failure once, and close connections that are broken."""
        self._backoff.failed()
        self._failing_since = min(self._failing_since, time.monotonic())
        if isinstance(error, DatabaseError):
            missing = not_migrated(error, self._using)
            words = "The database failed, and is asked again soon: %s"
            self._outages.failed(words, missing or message_of(error), kind=missing is None)
        else:
            self._bugs.failed(
                "A pass of the worker failed with %s, and is repeated soon: %s",
                type(error).__name__,
                message_of(error),
                kind=type(error),
                level=logging.ERROR,
                exc_info=shown(error),
            )
        check_connections(error=error)

    def check(self) -> None:
        """After a database error: raise the database's error unless it accepts writes again.

        A statement that changes nothing fails early, before a thousand leased timeouts would have to be released. It
        is a write, because a primary that was demoted still answers reads.
        """
        if self._outages.is_failing:
            WorkerSeen.objects.using(self._using).filter(pk="").update(held=0)

    def recovered(self, *, was_idle: bool) -> None:
        """Note that a pass succeeded. After an error in code an idle pass proves nothing, so it does not count."""
        self._outages.recovered("The database is back")
        if self._bugs.is_failing and was_idle:
            return
        self._bugs.recovered("The worker's passes succeed again")
        self._backoff.succeeded()
        self._failing_since = math.inf


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

    def ask_database(self) -> None:
        """Query the time of the database, several times while it is not known, or may have been set.

        One answer will be fast.
        """
        for _ in range(MIN_SAMPLES):
            asked_at = self._monotonic()
            now_ms = _ms(database_now(self._using))
            self._database.note(now_ms, late_ms=1000 * (self._monotonic() - asked_at))
            if self._database.is_steady:
                break

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
        # A clock that a test has stopped does not run on from its last sample: a row that is deferred would stay so.
        if offset is None or self._is_ours or clock.is_set():
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
