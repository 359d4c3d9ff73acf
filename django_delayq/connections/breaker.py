"""A circuit breaker: what has just failed is not asked again for a while, so that nobody waits for it in vain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from django_delayq.exceptions import EngineError, EngineUnavailable

logger = logging.getLogger("django_delayq.connections")

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 5.0


class Breaker:
    """Closed: every call passes. Open, after a failure: none does, until a pause is over. Then one call is the probe.

    A probe that fails doubles the pause, up to a few seconds; success closes the breaker. While a probe is under way
    the others are still refused: with a server that swallows packets each of them would wait for its own timeout.
    One line is logged when it opens and one when it closes. Threads share an instance.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = 0.0
        self._closed_again_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the last call failed, or is a probe that has not succeeded yet."""
        return self._pause > 0

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Runs the block, or raises EngineUnavailable at once; an EngineError out of the block opens the breaker."""
        is_probe = self._enter()
        try:
            yield
        except EngineError as error:
            self._failed(error, is_probe)
            raise
        except BaseException:
            if is_probe:  # it says nothing about Redis, but somebody else must be able to probe
                self._probing = False
            raise
        else:
            self._succeeded()

    def _enter(self) -> bool:
        with self._lock:
            if not self.is_open:
                return False
            if self._probing or self._clock() < self._closed_again_at:
                raise EngineUnavailable("Redis was not available a moment ago, and is not asked again yet")
            self._probing = True
            return True

    def _failed(self, error: EngineError, is_probe: bool) -> None:
        with self._lock:
            was_open = self.is_open
            if is_probe:
                self._probing = False
                self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            elif was_open:
                return  # it began before the breaker opened, and adds nothing to what is known
            else:
                self._pause = FIRST_PAUSE_SECONDS
            self._closed_again_at = self._clock() + self._pause
        if not was_open:
            logger.warning(
                "%s. Timeouts are safe in the ledger, and workers find them there", error, extra={"event": "redis_away"}
            )

    def _succeeded(self) -> None:
        if not self.is_open:
            return
        with self._lock:
            was_open, self._pause, self._probing = self.is_open, 0.0, False
        if was_open:
            logger.warning("Redis is available again", extra={"event": "redis_back"})
