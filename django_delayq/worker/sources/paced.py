"""Claim due timeouts of policies with a rate from the ledger: as many as may begin soon, in the order of deadlines.

Redis only wakes the worker for them. It delivers an entry once, whatever the length of the backlog, and the worker
removes it: until their slots come, these timeouts are neither leased nor claimed, and take no room from other policies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final

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
            granted = self._ledger.take_in_slots(policy, limit, preparation)
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
