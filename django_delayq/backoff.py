"""Back off from a component that fails, and log the beginning and the end of its failure once.

Used by everything that calls a server which may be unavailable: the circuit breaker, the worker's record of Redis and
the database, periodic jobs, executors and the wake-up thread.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, field


@dataclass
class Backoff:
    """The delay before the next try: `first` seconds, doubled with each failure in a row up to `longest`.

    Not thread-safe: threads that share an instance need a lock.

    `jitter` is the largest part of a delay that is left out at random, so that processes do not retry all at once.
    A failure within `steady_seconds` after a recovery belongs to the former outage, and doubles its delay.
    """

    first: float = 0.5
    """A server that restarts is back within a second; more often, each try would cost a thread."""
    longest: float = 5.0
    """How late the end of an outage is noticed. Shorter would fill the log of the server with refusals."""
    _: KW_ONLY
    jitter: float = 0.5
    steady_seconds: float = 0.0
    monotonic: Callable[[], float] = time.monotonic
    delay: float = field(default=0.0, init=False)
    """Seconds, without jitter. 0 before the first failure."""
    retry_at: float = field(default=-math.inf, init=False)
    """When the next try may begin, by the given clock."""
    is_failing: bool = field(default=False, init=False)
    """Whether the last try failed."""
    _recovered_at: float = field(default=-math.inf, init=False)

    @property
    def seconds_left(self) -> float:
        """Return how long to wait before the next try. 0: it may begin."""
        return max(0.0, self.retry_at - self.monotonic())

    def failed(self) -> None:
        now = self.monotonic()
        if not self.is_failing and now - self._recovered_at >= self.steady_seconds:
            self.delay = 0.0
        self.is_failing = True
        self.delay = min(max(2 * self.delay, self.first), self.longest)
        self.retry_at = now + self.delay * (1 - random.uniform(0, self.jitter))

    def succeeded(self) -> None:
        if self.is_failing:
            self.is_failing = False
            self._recovered_at = self.monotonic()
        self.retry_at = -math.inf


class StateLog:
    """Log once that a component fails, and once that it works again, with these events. Thread-safe.

    After a failure was logged, those of the next `quiet_seconds` are not, though the component has worked in between.
    """

    def __init__(
        self, logger: logging.Logger, failed: str, recovered: str = "", *, quiet_seconds: float = 0.0, **extra: object
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._quiet_until = -math.inf
        self._logger = logger
        self._failed = {**extra, "event": failed}
        self._recovered = {**extra, "event": recovered}
        self._lock = threading.Lock()
        self._kind: object = None
        self.is_failing = False
        """Whether a failure was logged, and its end was not."""

    def failed(
        self,
        message: str,
        *args: object,
        kind: object = None,
        level: int = logging.WARNING,
        exc_info: BaseException | bool | None = None,
    ) -> None:
        """Log a failure at `level`, or at DEBUG if it has the `kind` of the last one."""
        with self._lock:
            is_known = (self.is_failing and self._kind == kind) or time.monotonic() < self._quiet_until
            self.is_failing, self._kind = True, kind
            if not is_known:
                self._quiet_until = time.monotonic() + self._quiet_seconds
        if is_known:
            level, exc_info = logging.DEBUG, None
        self._logger.log(level, message, *args, exc_info=exc_info, extra=self._failed, stacklevel=2)

    def recovered(self, message: str = "", *args: object) -> None:
        """Log the end of a failure that was logged, at INFO: nothing is left to do. An empty message logs nothing."""
        with self._lock:
            was_failing, self.is_failing = self.is_failing, False
        if was_failing and message:
            self._logger.info(message, *args, extra=self._recovered, stacklevel=2)


class LogInterval:
    """Show whether it is time to log something again, such as a condition that concerns thousands of timeouts."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._logged_at: dict[Hashable, float] = {}

    def is_over(self, key: Hashable) -> bool:
        """Return whether the last True for `key` was this long ago, or there was none."""
        now = time.monotonic()
        recent = {each: at for each, at in self._logged_at.items() if now - at < self._seconds}
        self._logged_at = {key: now} | recent
        return key not in recent
