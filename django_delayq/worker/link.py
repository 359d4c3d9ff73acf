"""Whether Redis is there. Asked before each use, told after each failure, and put right by the sweep's thread."""

from __future__ import annotations

import logging
import threading
from typing import Final

from django_delayq.engine import Engine

logger = logging.getLogger("django_delayq.worker")

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 5.0


class Link:
    """The worker's engine, and whether it may be used just now. Threads share an instance.

    An outage is logged once at each end. While Redis is away only `probe` asks it, ever more rarely: with a server
    that swallows packets each asking costs a timeout, and the worker's own thread has better things to do.
    """

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._is_up = engine is not None
        self._pause = FIRST_PAUSE_SECONDS

    @property
    def is_up(self) -> bool:
        """Whether Redis is to be used; never without one."""
        return self._is_up

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next `probe`."""
        return self._pause

    def lost(self, error: Exception) -> None:
        """Redis failed: nobody uses it until a probe succeeds."""
        with self._lock:
            was_up, self._is_up = self._is_up, False
        if was_up:
            logger.warning(
                "%s. Until it is back, due timeouts are read from the ledger", error, extra={"event": "redis_away"}
            )
        else:
            logger.debug("Redis is still away: %s", error)

    def probe(self) -> None:
        """Returns if Redis answers; else raises EngineError, and the next probe is to come later."""
        assert self.engine is not None
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self.engine.ping()

    def back(self) -> None:
        """Redis answers, and knows again what is due."""
        with self._lock:
            was_up, self._is_up, self._pause = self._is_up, True, FIRST_PAUSE_SECONDS
        if not was_up:
            logger.warning("Redis is back, and wakes this worker again", extra={"event": "redis_back"})
