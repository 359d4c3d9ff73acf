"""The works of policies with a rate that this worker has claimed, and the slots in which they begin."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from django_delayq.firing import Work
from django_delayq.ledger.meters import Slot


class SlotQueue:
    """The works of one policy in due order, and their slots.

    A work is bound to a slot when the slot comes. So a slot for which this process is too late delays all works, and
    does not change their order; in the end a work is left for which there is no slot. For the worker's own thread.
    """

    def __init__(self) -> None:
        self._works: list[tuple[float, int, Work]] = []
        self._slots: deque[Slot] = deque()

    def __len__(self) -> int:
        """Return how many timeouts wait."""
        return sum(len(work.ids) for _, _, work in self._works)

    def add(self, work: Work) -> None:
        """Append a work with its slot."""
        self._slots.append(Slot(work.begin_at, work.begin_by))
        self.put_back(work)

    def put_back(self, work: Work) -> None:
        """Insert a work, with the slot that it was added with, in its place: it could not begin in the slot it got."""
        heappush(self._works, (work.begin_at, work.ids[0], work))

    @property
    def next_at(self) -> float:
        """Return when the next work begins, by `time.monotonic()`; infinite if none waits."""
        return self._slots[0].begin_at if self._works and self._slots else inf

    def ready(self, early_seconds: float) -> Iterator[Work]:
        """Remove and yield the works whose slot has come or comes within `early_seconds`, with that slot."""
        while self.next_at - early_seconds <= time.monotonic():
            slot = self._slots.popleft()
            if time.monotonic() <= slot.begin_by:
                yield replace(heappop(self._works)[2], begin_at=slot.begin_at, begin_by=slot.begin_by)

    def without_slot(self) -> list[Work]:
        """Remove and return the works that are left although there is no slot any more."""
        return [] if self._slots else self.clear()

    def clear(self) -> list[Work]:
        """Remove and return all works, and forget the slots."""
        works, self._works = [work for _, _, work in self._works], []
        self._slots.clear()
        return works
