"""How long to wait before a timeout is tried again that could not be fired through no fault of its own."""

from __future__ import annotations

import logging
import random
import threading
import time
from datetime import timedelta
from typing import NamedTuple

logger = logging.getLogger("django_delayq.firing")

FIRST = 0.1
LOCKED_CEILING = 5.0
"""Seconds at most between two looks at an object that others hold."""
BEAT = 2.5
"""Waits for a lock that have reached their ceiling end at multiples of so many seconds."""
TROUBLE_CEILING = 60.0
"""Seconds at most between two tries that database trouble ended: the handler may have run in vain."""
_SAY_AFTER = 30.0
_MOST = 10_000


class _Waiting(NamedTuple):
    times: int
    since: float
    said: float


class _Patience:
    """Per timeout of this process: how often in a row, and since when. Bounded; forgetting only shortens a wait."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._lock = threading.Lock()

    def wait(self, using: str, timeout_id: int, why: str, ceiling: float) -> timedelta:
        """Return the next wait: 50 to 150 ms at first, doubling up to `ceiling`; a long one is logged every 30 s.

        Jittered, so that two workers who deadlocked do not meet again.
        """
        now = time.monotonic()
        with self._lock:
            before = self._waiting.pop((using, timeout_id), _Waiting(0, now, now))
            says = now - before.said >= _SAY_AFTER
            if len(self._waiting) >= _MOST:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[using, timeout_id] = _Waiting(before.times + 1, before.since, now if says else before.said)
        if says:
            logger.warning(
                "Timeout %s has waited %.0f s to be fired: %s",
                timeout_id,
                now - before.since,
                why,
                extra={"event": "timeout_waits", "timeout_id": timeout_id},
            )
        base = min(FIRST * 2 ** min(before.times, 20), ceiling)
        if base == ceiling == LOCKED_CEILING:  # on a common beat: thousands of locked ones come back as a few groups
            seconds = base * random.uniform(1.0, 1.5)
            return timedelta(seconds=seconds - (now + seconds) % BEAT)
        return timedelta(seconds=base * random.uniform(0.5, 1.5))

    def forget(self, using: str, timeout_id: int) -> None:
        """It has been fired, or has another reason to wait."""
        if self._waiting:
            with self._lock:
                self._waiting.pop((using, timeout_id), None)

    def forget_all(self) -> None:
        """As in a process that has just started: for tests."""
        with self._lock:
            self._waiting.clear()


patience = _Patience()
