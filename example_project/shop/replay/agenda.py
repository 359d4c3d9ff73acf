"""The next due timeout, kept from the signals of the library without a query."""

from __future__ import annotations

import heapq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django_delayq import signals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from django_delayq.models import Timeout

ARMED = (signals.timeout_scheduled, signals.timeout_rescheduled, signals.timeout_failed)
SETTLED = (signals.timeout_cancelled, signals.timeout_fired, signals.timeout_skipped, signals.timeout_dead)


class Agenda:
    """The pending timeouts of this process by the time of their next attempt.

    It is only complete while no other process schedules or fires in the same database.
    """

    def __init__(self) -> None:
        self._upcoming: list[tuple[datetime, int]] = []
        self._next_run: dict[int, datetime] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Record every signal inside the block."""
        for signal in ARMED:
            signal.connect(self._note)
        for signal in SETTLED:
            signal.connect(self._strike)
        try:
            yield
        finally:
            for signal in ARMED:
                signal.disconnect(self._note)
            for signal in SETTLED:
                signal.disconnect(self._strike)

    def first(self) -> tuple[datetime, int] | None:
        """Return the time and the id of the next pending timeout; for equal times the oldest."""
        while self._upcoming:
            run_at, pk = self._upcoming[0]
            if self._next_run.get(pk) == run_at:
                return run_at, pk
            heapq.heappop(self._upcoming)
        return None

    def _note(self, timeout: Timeout, **_: Any) -> None:
        self._next_run[timeout.pk] = timeout.run_at
        heapq.heappush(self._upcoming, (timeout.run_at, timeout.pk))

    def _strike(self, timeout: Timeout, **_: Any) -> None:
        self._next_run.pop(timeout.pk, None)
