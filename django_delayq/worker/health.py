"""Whether Redis and the database work, as this worker finds when it uses them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from django.db import Error as DatabaseError

from django_delayq.backoff import Backoff, StateLog
from django_delayq.engine import Engine
from django_delayq.exceptions import EngineError, EngineFull, ForeignEngine
from django_delayq.ledger.db_connections import check_connections, not_migrated
from django_delayq.ledger.installation import check_prefix
from django_delayq.ledger.scrubbing import message_of, shown
from django_delayq.models import WorkerSeen

logger = logging.getLogger("django_delayq.worker")

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 5.0
ROOM_SECONDS: Final = 30.0
"""Redis counts as full for this long after a refusal, because at its limit it refuses only some calls."""


class RedisHealth:
    """The worker's engine, and whether it may be used now. Thread-safe.

    While Redis is unavailable only `probe` calls it, with growing delays: a server that drops packets costs a timeout
    for each call.

    A Redis that is out of memory is still up. The worker must continue to take entries from it, or it would stay full.
    The timeouts that it has no room for are read from the ledger meanwhile.
    """

    def __init__(self, engine: Engine | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.is_up = engine is not None
        """Whether Redis may be used."""
        self.is_full = False
        """Whether due timeouts may be missing from Redis although it is up."""
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._full_at = 0.0
        self._backoff = Backoff(
            FIRST_PAUSE_SECONDS,
            LONGEST_PAUSE_SECONDS,
            jitter=0,
            steady_seconds=LONGEST_PAUSE_SECONDS,
            monotonic=monotonic,
        )
        self._outages = StateLog(logger, "redis_away", "redis_back")
        self._shortages = StateLog(logger, "redis_full", "redis_has_room")

    @property
    def probe_seconds(self) -> float:
        """Return how long to wait before the next `probe`."""
        return self._backoff.delay

    def reach(self) -> None:
        """Call Redis, so that it is known at the start whether it answers."""
        if self.engine is not None and self.is_up:
            try:
                self.engine.ping()
            except EngineError as error:
                self.lost(error)

    def failed(self, error: Exception, *, was_probe: bool = False) -> None:
        """Note an error of a call that Redis may refuse for lack of memory alone. Other errors are as in `lost`.

        After a probe, or a full sweep behind it, also double the delay before the next one.
        """
        if not isinstance(error, EngineFull):
            self.lost(error)
        else:
            with self._lock:
                self.is_full, self._full_at = True, self._monotonic()
            self._shortages.failed("%s. Timeouts that it has no room for are read from the ledger", error)
        if was_probe:
            with self._lock:
                self._backoff.failed()

    def lost(self, error: Exception) -> None:
        """Note that Redis is unavailable. It is not used until a probe succeeds."""
        with self._lock:
            if self.is_up:
                self.is_up = False
                self._backoff.failed()
        is_foreign = isinstance(error, ForeignEngine)
        level = logging.ERROR if is_foreign else logging.WARNING
        words = "%s. Until it is back, due timeouts are read from the ledger"
        self._outages.failed(words, error, kind=is_foreign, level=level)

    def probe(self, queues: Iterable[str]) -> None:
        """Check that Redis accepts for all these queues what a worker sends; raise EngineError if it does not.

        A ping is not enough: a replica, and a server that cannot save, answer it. And another installation may have
        claimed a Redis that was emptied.
        """
        assert self.engine is not None
        self.engine.ping()
        check_prefix(self.engine)
        for queue in queues:
            for shard in range(self.engine.shards):
                self.engine.queue(queue, shard).probe()

    def recovered(self) -> None:
        """Note that Redis works, and contains the due timeouts again."""
        with self._lock:
            self.is_up = True
            self._backoff.succeeded()
        self._outages.recovered("Redis is back, and wakes this worker again")

    def accepted(self) -> None:
        """Note that Redis has accepted everything that a sweep sent."""
        with self._lock:
            if not self.is_full or self._monotonic() - self._full_at <= ROOM_SECONDS:
                return
            self.is_full = False
        self._shortages.recovered("Redis has room again")


class DatabaseHealth:
    """Whether the passes of the main loop succeed. For one thread."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._backoff = Backoff(0.25, 5.0)
        self._outages = StateLog(logger, "database_away", "database_back")
        self._bugs = StateLog(logger, "pass_failed", "pass_succeeded")

    @property
    def seconds_left(self) -> float:
        """Return how long to wait before the next pass. 0: it may begin."""
        return self._backoff.seconds_left

    def failed(self, error: Exception) -> None:
        """Delay the next pass, log the failure once, and close connections that are broken."""
        self._backoff.failed()
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
