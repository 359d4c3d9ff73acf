"""The timeouts of policies with a rate: claim as many as may begin soon, and keep their works until their slots come.

They are claimed in the ledger, in the order of deadlines. Redis only wakes the worker for them. It delivers an entry
once, whatever the length of the backlog, and the worker removes it: until it is claimed shortly before its slot, a
timeout is neither leased nor claimed, and takes no room from other policies.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, Final

from django_delayq.firing import Work
from django_delayq.ledger.meters import TURN_SECONDS, Slot
from django_delayq.policies import registry
from django_delayq.worker.sources import Batch

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy
    from django_delayq.worker.sources.ledger import LedgerSource

POLL_SECONDS: Final = 1.0
"""How late a timeout may be that no entry in Redis has announced, or one of an attempt that another worker released."""
BUSY_SECONDS: Final = 0.1
"""When to ask again while this worker has enough timeouts of the policy, or another worker is claiming some."""
PREPARATION_SECONDS: Final = 0.02
"""What a worker needs from the end of a claim until its threads can begin, on a machine that is not busy."""


class PacedSource:
    """The due timeouts of all policies with a rate. For the worker's own thread.

    `ledger` claims them, and releases, extends and resolves the claims.
    """

    def __init__(self, ledger: LedgerSource) -> None:
        self._ledger = ledger
        self._check_at: dict[str, float] = {}
        self._refused_until: dict[str, float] = {}
        """Until when no slot is free, by label."""
        self._seconds = 0.0
        """How long the last claim took."""

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next check; infinite if no policy has a rate."""
        return max(0.0, min(self._check_at.values(), default=inf) - time.monotonic())

    def note_due(self, label: str, seconds: float) -> None:
        """Check the policy `label`, of which a timeout is due in so many seconds, as soon as a slot may be free."""
        at = max(time.monotonic() + seconds, self._refused_until.get(label, 0.0))
        self._check_at[label] = min(at, self._check_at.get(label, inf))

    def take(self, most: int, in_flight: Mapping[str, int], left: int) -> Batch:
        """Claim due timeouts with their slots.

        Args:
            most: how many of each policy this worker can run within half a second; others are left to other workers.
            in_flight: how many it has already, by policy.
            left: how many it may claim together.

        Raises:
            django.db.Error: the database failed.
        """
        deliveries: dict[int, int] = {}
        slots: dict[int, Slot] = {}
        for policy in self._with_due():
            limit = min(most - in_flight.get(policy.label, 0), left - len(deliveries))
            if limit <= 0:
                self._check_at[policy.label] = time.monotonic() + BUSY_SECONDS
                continue
            preparation = min(PREPARATION_SECONDS + 2 * self._seconds, TURN_SECONDS)
            began = time.monotonic()
            try:
                granted = self._ledger.take_in_slots(policy, limit, preparation)
            except Exception:
                self._ledger.release(deliveries)
                raise
            now = time.monotonic()
            if granted is None:
                self._check_at[policy.label] = now + random.uniform(0.0, BUSY_SECONDS)
                continue
            self._seconds = now - began
            deliveries |= granted.claimed.claims
            slots |= granted.slots
            # Timeouts are due, so a claim without any was too early for a slot, or another worker was faster.
            self._refused_until[policy.label] = now + granted.wait_seconds
            self._check_at[policy.label] = now + max(granted.wait_seconds, 0.0 if granted.slots else BUSY_SECONDS)
        return Batch(deliveries, slots=slots)

    def _with_due(self) -> list[TimeoutPolicy[Any]]:
        """Return the policies whose turn to be checked it is, and that have due timeouts which are not claimed."""
        now = time.monotonic()
        checked = [policy for policy in registry if policy.rate and self._check_at.get(policy.label, 0.0) <= now]
        if not checked:
            return []
        found = set(self._ledger.labels_with_due([label for policy in checked for label in policy.labels]))
        self._check_at |= {policy.label: now + POLL_SECONDS for policy in checked}
        return [policy for policy in checked if not found.isdisjoint(policy.labels)]


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
