"""The circuit breaker of web processes: after a failure no call waits for Redis for a while."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, TypeVar

from django_delayq.backoff import Backoff, StateLog
from django_delayq.engine.scripts import Call, Caller, Client
from django_delayq.exceptions import EngineError, EngineUnavailable

logger = logging.getLogger("django_delayq.redis")

T = TypeVar("T")

LIMIT_SECONDS: Final = 0.25
"""How long a call waits at most, for name servers, several addresses, handshakes and sentinels together."""
FRESH_SECONDS: Final = 10.0
"""A connection that was used within this time most likely needs no look-up and no handshake."""


def call_in_thread(work: Callable[[], T]) -> Future[T]:
    """Call `work` in a daemon thread of its own, or in the caller's if no thread can be started.

    For calls without a timeout: to look up a host name may take half a minute, whatever the timeouts of the sockets.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by future.result()
            future.set_exception(error)

    try:
        threading.Thread(
            target=contextvars.copy_context().run, args=(run,), name="delayq-redis-call", daemon=True
        ).start()
    except RuntimeError:  # no thread left on this machine, or the interpreter shuts down
        run()
    return future


class Breaker:
    """Closed: calls pass. Open, after a failure: calls are refused until a delay is over; the next one starts a probe.

    The probe runs in a thread of its own while its caller is refused, too. So an outage costs `LIMIT_SECONDS` for the
    calls that run when it begins, and later calls nothing. There is one probe at a time. A probe that fails doubles
    the delay, and one that succeeds closes the breaker, as does a call that succeeds after its limit.

    A call that may have to open a connection also runs in a thread of its own. A call that finds an open one, as
    nearly all do, runs in the caller's thread, which is faster.

    The first failure is logged, and the recovery once the breaker has been closed for some seconds: a server that is
    out of memory fails and works in turns. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._backoff = Backoff(jitter=0, steady_seconds=Backoff.longest, monotonic=clock)
        self._log = StateLog(logger, "redis_away", "redis_back")
        self._is_probing = False
        self._closed_at = self._succeeded_at = float("-inf")
        self._closings = 0
        """How often it was closed."""
        self._running = 0
        self._connected = 0
        """How many calls have succeeded at the same time: that many connections are open."""

    @property
    def is_open(self) -> bool:
        return self._backoff.is_failing

    def call(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise its exception, which opens the breaker.

        Raises EngineUnavailable after `LIMIT_SECONDS`, and immediately while the breaker is open.
        """
        with self._lock:
            is_refused = self.is_open
            is_probe = is_refused and not self._is_probing and not self._backoff.seconds_left
            self._is_probing = self._is_probing or is_probe
            is_connected = self._running < self._connected and self._clock() < self._succeeded_at + FRESH_SECONDS
            self._running += not is_refused
            closings = self._closings
        if is_probe:
            try:
                call_in_thread(work).add_done_callback(self._probed)
            except BaseException:  # of a signal handler: without a probe the breaker would never close
                with self._lock:
                    self._is_probing = False
                raise
        if is_refused:
            raise EngineUnavailable("Redis has just been unavailable, and is not called again yet")
        try:
            result = work() if is_connected else self._within_limit(work)
        except Exception as error:
            self._failed(error, closings)
            raise
        else:
            self._succeeded()
            return result
        finally:
            with self._lock:
                self._running -= 1

    def _within_limit(self, work: Callable[[], T]) -> T:
        future = call_in_thread(work)
        wait([future], LIMIT_SECONDS)
        if not future.done():
            future.add_done_callback(self._answered_late)
            raise EngineUnavailable(f"Redis is not available: no answer for {LIMIT_SECONDS:g} seconds")
        return future.result()

    def _answered_late(self, future: Future[Any]) -> None:
        """Close the breaker after a late success: the server is far away, and the connection to it is open now."""
        if future.exception() is None:
            with self._lock:
                self._close()

    def _probed(self, future: Future[Any]) -> None:
        error = future.exception()
        with self._lock:
            self._is_probing = False
            if error is None:
                self._close()
            else:
                self._backoff.failed()
        if error is not None:
            logger.debug("Redis is still unavailable: %s", error)

    def _close(self) -> None:
        self._backoff.succeeded()
        self._closings += 1
        self._closed_at = self._succeeded_at = self._clock()
        self._connected = 1

    def _failed(self, error: Exception, closings: int) -> None:
        with self._lock:
            if self.is_open or self._closings > closings:
                return  # it began before the breaker opened, or was closed
            self._backoff.failed()
            self._connected = 0
        is_known = isinstance(error, EngineError)
        self._log.failed(
            "%s. Timeouts are safe in the database, and workers find them there",
            error if is_known else repr(error),
            exc_info=None if is_known else error,
        )

    def _succeeded(self) -> None:
        with self._lock:
            if self.is_open:
                return  # it began before the outage: only a probe shows that Redis is back
            self._succeeded_at = self._clock()
            self._connected = max(self._connected, self._running)
            is_back = self._succeeded_at - self._closed_at >= Backoff.longest
        if is_back and self._log.is_failing:
            self._log.recovered("Redis is available again")


class GuardedCaller(Caller):
    """The caller of an engine whose calls fail at once, without calling Redis, while its circuit breaker is open.

    Only `Engine.ping` and what calls the client itself are not guarded.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.breaker = Breaker()

    def send(self, calls: Sequence[Call]) -> list[Any]:
        return self.breaker.call(partial(super().send, calls))
