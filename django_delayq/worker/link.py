"""Whether Redis is there. Asked before each use, told after each failure, and put right by the sweep's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from django_delayq.engine import Engine
from django_delayq.exceptions import EngineFull

logger = logging.getLogger("django_delayq.worker")

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 5.0
ROOM_SECONDS: Final = 30.0
"""A Redis that was full is believed to have room after so long without a refusal: at its limit it has it by turns."""


class Link:
    """The worker's engine, and whether it may be used just now. Threads share an instance.

    An outage is logged once at each end. While Redis is away only `probe` asks it, ever more rarely: with a server
    that swallows packets each asking costs a timeout, and the worker's own thread has better things to do. An outage
    that follows close upon another goes on with its pause.

    A Redis that is out of memory is not away: what is in it comes out, and must, or it would stay full. But what the
    ledger knows and Redis has no room for is to be read from the ledger meanwhile.
    """

    def __init__(self, engine: Engine | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._is_up = engine is not None
        self._is_full = False
        self._pause = FIRST_PAUSE_SECONDS
        self._back_at = self._full_at = float("-inf")

    @property
    def is_up(self) -> bool:
        """Whether Redis is to be used; never without one."""
        return self._is_up

    @property
    def is_full(self) -> bool:
        """Whether Redis may lack what is due, although it is up."""
        return self._is_full

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next `probe`."""
        return self._pause

    def failed(self, error: Exception) -> None:
        """Redis refused something that it may refuse for want of memory alone: it is full, or else lost."""
        if isinstance(error, EngineFull):
            self._filled(error)
        else:
            self.lost(error)

    def lost(self, error: Exception) -> None:
        """Redis failed: nobody uses it until a probe succeeds."""
        with self._lock:
            was_up, self._is_up = self._is_up, False
            if was_up and self._monotonic() - self._back_at > LONGEST_PAUSE_SECONDS:
                self._pause = FIRST_PAUSE_SECONDS
        if was_up:
            logger.warning(
                "%s. Until it is back, due timeouts are read from the ledger", error, extra={"event": "redis_away"}
            )
        else:
            logger.debug("Redis is still away: %s", error)

    def probe(self, queues: Iterable[str]) -> None:
        """Returns if Redis does for all these queues what a worker needs; else raises EngineError.

        The next probe is to come later. A ping is not enough: a replica, and a server that cannot save, answer it as
        if all were well.
        """
        assert self.engine is not None
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self.engine.ping()
        for queue in queues:
            for shard in range(self.engine.shards):
                self.engine.queue(queue, shard).probe()

    def back(self) -> None:
        """Redis answers, and knows again what is due."""
        with self._lock:
            was_up, self._is_up = self._is_up, True
            if not was_up:
                self._back_at = self._monotonic()
        if not was_up:
            logger.warning("Redis is back, and wakes this worker again", extra={"event": "redis_back"})

    def took_all(self) -> None:
        """Redis has just taken everything that it was given."""
        with self._lock:
            has_room = self._is_full and self._monotonic() - self._full_at > ROOM_SECONDS
            self._is_full = self._is_full and not has_room
        if has_room:
            logger.warning("Redis has room again", extra={"event": "redis_has_room"})

    def _filled(self, error: Exception) -> None:
        with self._lock:
            was_full, self._is_full = self._is_full, True
            self._full_at = self._monotonic()
        if not was_full:
            logger.warning("%s. What it has no room for is read from the ledger", error, extra={"event": "redis_full"})
