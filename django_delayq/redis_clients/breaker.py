"""A circuit breaker: what has just failed is not asked again for a while, so that nobody waits for it in vain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from django_delayq.exceptions import EngineError, EngineUnavailable
from django_delayq.redis_clients.errands import Errand, NotBack

logger = logging.getLogger("django_delayq.connections")

T = TypeVar("T")

LIMIT_SECONDS: Final = 0.25
"""What a call waits at most, for name servers, several addresses, handshakes and sentinels together."""
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 5.0
FRESH_SECONDS: Final = 10.0
"""A connection that was used so lately needs no look-up and no handshake, most likely."""


class Breaker:
    """Closed: calls pass. Open, after a failure: none does, until a pause is over; the next call is then the probe.

    Nobody waits for the probe: it is made in a thread of its own, while its caller is refused like all others. So an
    outage costs each thread that is in a call when it begins `LIMIT_SECONDS`, and later calls nothing. One probe at a
    time; one that fails doubles the pause, up to a few seconds, and success closes the breaker, as does an answer that
    comes when nobody waits for it any more. An outage that follows close upon another goes on with its pause.

    Calls that may have to open a connection are made in a thread of their own too, as looking up a name has no
    timeout. Those that find an open one, almost all, are made in the caller's: that is quicker.

    One line is logged when it opens, and one when it has been closed again for some seconds: a server that is out of
    memory forgets entries and takes none, so that it fails and works by turns. Threads share an instance.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._clock = clock
        self._limit_seconds = limit_seconds
        self._lock = threading.Lock()
        self._is_open = self._is_probing = self._is_told = False
        self._pause = 0.0
        self._asks_again_at = 0.0
        self._closed_at = self._succeeded_at = float("-inf")
        self._running = 0
        self._connected = 0
        """So many calls at once have succeeded: as many connections are there."""

    @property
    def is_open(self) -> bool:
        """Whether a call failed, and none has succeeded since."""
        return self._is_open

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; an exception opens the breaker.

        Raises EngineUnavailable after `limit_seconds`, and at once while the breaker is open.
        """
        with self._lock:
            is_refused = self._is_open
            is_probe = self._is_open and not self._is_probing and self._clock() >= self._asks_again_at
            self._is_probing = self._is_probing or is_probe
            is_connected = self._running < self._connected and self._clock() < self._succeeded_at + FRESH_SECONDS
            self._running += not is_refused
        if is_probe:
            Errand(partial(self._probe, work))
        if is_refused:
            raise EngineUnavailable("Redis was not available a moment ago, and nobody waits for it now")
        try:
            result = work() if is_connected else self._within_limit(work)
        except Exception as error:
            self._failed(error)
            raise
        else:
            self._succeeded()
            return result
        finally:
            with self._lock:
                self._running -= 1

    def _within_limit(self, work: Callable[[], T]) -> T:
        is_late = threading.Event()

        def errand() -> T:
            result = work()
            if is_late.is_set():
                # Far away, not away: opening a connection to it just takes longer, and now one is open.
                with self._lock:
                    self._close()
            return result

        try:
            return Errand(errand).wait(self._limit_seconds)
        except NotBack:
            is_late.set()
            raise EngineUnavailable(f"Redis is not available: no answer for {self._limit_seconds:g} seconds") from None

    def _probe(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is no success
            logger.debug("Redis is still away: %s", error)
            with self._lock:
                self._is_probing = False
                self._open_for(2 * self._pause)
            return
        with self._lock:
            self._is_probing = False
            self._close()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self._is_open:
                return  # it began before the breaker opened, and adds nothing to what is known
            self._is_open = True
            is_new = self._clock() - self._closed_at > LONGEST_PAUSE_SECONDS
            self._open_for(FIRST_PAUSE_SECONDS if is_new else 2 * self._pause)
            self._connected = 0
            was_told, self._is_told = self._is_told, True
        if was_told:
            return
        logger.warning(
            "%s. Timeouts are safe in the ledger, and workers find them there",
            error if isinstance(error, EngineError) else repr(error),
            exc_info=None if isinstance(error, EngineError) else error,
            extra={"event": "redis_away"},
        )

    def _close(self) -> None:
        self._is_open = False
        self._closed_at = self._succeeded_at = self._clock()
        self._connected = 1

    def _open_for(self, pause: float) -> None:
        self._pause = min(pause, LONGEST_PAUSE_SECONDS)
        self._asks_again_at = self._clock() + self._pause

    def _succeeded(self) -> None:
        with self._lock:
            if self._is_open:
                return  # it began before the outage: only a probe knows better
            self._succeeded_at = self._clock()
            self._connected = max(self._connected, self._running)
            is_back = self._is_told and self._succeeded_at - self._closed_at >= LONGEST_PAUSE_SECONDS
            self._is_told = self._is_told and not is_back
        if is_back:
            logger.warning("Redis is available again", extra={"event": "redis_back"})
