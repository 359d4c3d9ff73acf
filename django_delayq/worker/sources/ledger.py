"""Claim due rows in the ledger, each for one worker.

Without Redis, `LedgerSource` reads them once a second. `PacedSource` always claims those of policies with a rate, as
many as may begin soon, and `SlotQueue` keeps their works until their slots come. Redis only wakes the worker for them.
It delivers an entry once, whatever the length of the backlog, and the worker removes it: until it is claimed shortly
before its slot, a timeout is neither leased nor claimed, and takes no room from other policies.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, Final

from django_delayq.conf import get_settings
from django_delayq.firing.state import firing_state
from django_delayq.firing.work import Work
from django_delayq.ledger import claiming
from django_delayq.ledger.claiming import TURN_SECONDS, Slot, Spacing
from django_delayq.ledger.statements import chunks
from django_delayq.policies import registry
from django_delayq.worker.servers import ClockSkew

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

POLL_SECONDS: Final = 1.0
"""Without Redis, how late a timeout may be. With a rate, one that no entry in Redis has announced, or that another
worker has released."""
BUSY_SECONDS: Final = 0.1
"""When to ask again while this worker has enough timeouts of the policy, or another worker is claiming some."""
PREPARATION_SECONDS: Final = 0.02
"""What a worker needs from the end of a claim until its threads can begin, on a machine that is not busy."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Timeouts that a source has leased or claimed for this worker.

    `deliveries`: how often each id was delivered. `wait_seconds`: how long to wait before the next `take`.
    `is_part`: more timeouts are due than there was room for. `slots`: when those of policies with a rate may begin.
    """

    deliveries: Mapping[int, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    is_part: bool = False
    slots: Mapping[int, Slot] = field(default_factory=dict)


class LedgerSource:
    """A source of due timeouts that needs only the ledger. Raises the database's errors."""

    def __init__(self, using: str, queues: Sequence[str] | None, skew: ClockSkew) -> None:
        self._using = using
        self.queues = queues
        self._skew = skew
        self._lock = threading.Lock()
        self._poll_at = 0.0
        self._claimed: dict[int, datetime] = {}
        """Until when each id is claimed."""
        self._again: dict[datetime, dict[int, datetime]] = {}
        """What to release, by the expiry of its claim."""

    def take(self, room: int) -> Batch:
        """Claim at most `room` due rows, once a second, or at once while more are due."""
        wait = self._poll_at - time.monotonic()
        return Batch(wait_seconds=wait) if wait > 0 else self.take_now(room)

    def take_now(self, room: int) -> Batch:
        """Do the same without waiting for the next second."""
        self._poll_at = time.monotonic() + POLL_SECONDS
        # Most polls find nothing. They must not begin a writing transaction, because SQLite allows only one at a time.
        paced = [label for policy in registry if policy.rate for label in policy.labels]
        without = [*firing_state.unknown.labels(), *paced]
        if not claiming.is_any_claimable(self._using, self.queues, without):
            return Batch(wait_seconds=POLL_SECONDS)
        claims = self._note(claiming.claim(self._using, self.queues, room, get_settings().lease, without))
        if len(claims) < room:
            return Batch(claims, POLL_SECONDS)
        self._poll_at = 0.0
        return Batch(claims, is_part=True)

    def labels_with_due(self, labels: Sequence[str]) -> list[str]:
        """Return those of `labels` whose policies have rows that are due and not claimed."""
        return claiming.labels_with_claimable(self._using, self.queues, labels)

    def take_of(self, limits: Mapping[str, int]) -> Mapping[int, int]:
        """Claim at most so many due rows of each label; return their deliveries."""
        return self._note(claiming.claim_each(self._using, self.queues, limits, get_settings().lease))

    def take_in_slots(self, policy: TimeoutPolicy[Any], limit: int, preparation: float) -> claiming.Granted | None:
        """Claim due rows of a policy with a rate: see `claiming.claim_in_slots`."""
        lease = get_settings().lease
        granted = claiming.claim_in_slots(
            policy, self._using, self.queues, limit=limit, seconds=lease, preparation=preparation
        )
        if granted is not None:
            self._note(granted.claimed)
        return granted

    def _note(self, claimed: claiming.Claimed) -> Mapping[int, int]:
        self._skew.note_database(claimed.now)
        with self._lock:
            self._claimed.update(dict.fromkeys(claimed.claims, claimed.until))
        return claimed.claims

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        with self._lock:
            for id in done:
                self._claimed.pop(id, None)
            for id, due_at in again.items():
                until = self._claimed.pop(id, None)
                if until is not None:
                    self._again.setdefault(until, {})[id] = due_at
                    wait = max(0.0, (due_at - self._skew.now()).total_seconds())
                    self._poll_at = min(self._poll_at, time.monotonic() + wait)

    def release(self, ids: Iterable[int]) -> None:
        """Note that `ids`, which the caller has claimed and lost in an error, are to be delivered again at once."""
        self.resolve((), dict.fromkeys(ids, self._skew.now()))

    def flush(self) -> None:
        """Release claims. Rows that are locked by others stay noted for the next call."""
        for until, again in list(self._again.items()):
            locked = claiming.release(again, until, self._using)
            with self._lock:
                left = {id: due_at for id, due_at in self._again.pop(until).items() if id in locked}
                if left:
                    self._again[until] = left

    def extend(self) -> None:
        with self._lock:  # held throughout: resolve() must not release a claim that has just been extended
            by_claim: dict[datetime, list[int]] = {}
            for id, until in self._claimed.items():
                by_claim.setdefault(until, []).append(id)
            for until, ids in by_claim.items():
                for chunk in chunks(ids, claiming.CHUNK):  # noted one by one: an error does not undo those before it
                    longer, kept = claiming.extend(chunk, until, get_settings().lease, self._using)
                    self._claimed.update(dict.fromkeys(kept, longer))


def slot_seconds(policy: TimeoutPolicy[Any]) -> float:
    """Return how long it is from one slot of `policy` to the next; 0 without a rate."""
    return Spacing.of(policy.rate, policy.transaction_size).interval if policy.rate else 0.0


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
    """The works of one policy with a rate in due order, and their slots; or all works of policies without one.

    A work is bound to a slot when the slot comes. So a slot for which this process is too late delays all works, and
    does not change their order; in the end a work is left for which there is no slot. Without a rate, the slot of a
    work begins at its deadline and never ends. For the worker's own thread.
    """

    def __init__(self) -> None:
        self._works: list[tuple[float, int, Work]] = []
        self._slots: list[Slot] = []

    def __len__(self) -> int:
        """Return how many timeouts wait."""
        return sum(len(work.ids) for _, _, work in self._works)

    def add(self, work: Work) -> None:
        """Insert a work with its slot."""
        heappush(self._slots, Slot(work.begin_at, work.begin_by))
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
            slot = heappop(self._slots)
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
