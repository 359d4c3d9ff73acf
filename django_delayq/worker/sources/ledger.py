"""Claim due rows in the ledger, each for one worker.

Without Redis, `LedgerSource` asks once a second which lines have some, or will have before it asks again: the worker
waits for each deadline. It always claims those of policies with a rate, as many as may begin soon, and `SlotQueue`
keeps their works until their slots come. Redis only shows that their line is due: until it is claimed shortly before
its slot, a timeout is neither leased nor claimed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, Final

from django_delayq.conf import get_settings
from django_delayq.firing.works import Work
from django_delayq.ledger import claiming
from django_delayq.ledger.claiming import TURN_SECONDS, Slot, Spacing
from django_delayq.ledger.controls import stop_cache
from django_delayq.sql.statements import chunks
from django_delayq.worker.servers import ClockSkew

if TYPE_CHECKING:
    from django_delayq.policy.policies import TimeoutPolicy
    from django_delayq.worker.lines import Lines, MayRun

POLL_SECONDS: Final = 1.0
"""How often a worker asks each source: the delay that a lost wake-up message of Redis costs at most, and without Redis
that of a timeout that was scheduled shortly before its deadline."""
BUSY_SECONDS: Final = 0.1
"""When to ask again while this worker has enough timeouts of the policy, or another worker is claiming some."""
CLAIMED_AHEAD: Final = timedelta(seconds=POLL_SECONDS + BUSY_SECONDS)
"""Rows are claimed this long before they are due: they would be due before the next poll has claimed them."""
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
    labels: Mapping[int, str] = field(default_factory=dict)
    """The policy of each id that came from a line without a rate."""


class LedgerSource:
    """A source of due timeouts that needs only the ledger. Raises the database's errors."""

    def __init__(self, using: str, queues: Sequence[str] | None, skew: ClockSkew) -> None:
        self._using = using
        self.queues = queues
        self._skew = skew
        self.ahead = CLAIMED_AHEAD
        """How long before their deadline rows are claimed."""
        self._lock = threading.Lock()
        self._poll_at = 0.0
        self._with_more: Collection[str] = ()
        """The lines that had more due rows than were claimed when they were asked last."""
        self._claimed: dict[int, datetime] = {}
        """Until when each id is claimed."""
        self._again: dict[datetime, dict[int, datetime]] = {}
        """What to release, by the expiry of its claim."""
        self._claim_seconds = 0.0
        """How long the last claim of a policy with a rate took."""
        self.without_slots: set[str] = set()
        """The policies of which due rows were left, because their slots, or those of their values, are used up."""

    def check_now(self) -> None:
        """Make the next `due` ask."""
        self._poll_at = 0.0

    def due(self, lines: Lines) -> Collection[str]:
        """Ask once a second. In between the lines that had more are due."""
        if time.monotonic() < self._poll_at:
            return self._with_more
        self._poll_at = time.monotonic() + POLL_SECONDS
        # Most polls find nothing. They must not begin a writing transaction, because SQLite allows only one at a time.
        # Also the lines whose next slot comes before the next poll.
        declared = lines.declared(POLL_SECONDS)
        found = claiming.labels_with_claimable(self._using, self.queues, list(declared), self.ahead)
        # Slots are assigned to due rows only.
        self._with_more = [line for line, is_due in found.items() if is_due or declared[line].rate is None]
        if not stop_cache.last(self._using).stopped.keys().isdisjoint(declared[line].label for line in self._with_more):
            stop_cache.forget()  # they are not stopped any more
        return self._with_more

    def first_due(self, lines: Lines) -> Mapping[str, int]:
        """Return the first row of each line that is due and that no worker has claimed, and have the next `due` ask."""
        self.check_now()
        rows = {line: claiming.claimable(self._using, self.queues, line) for line in self.due(lines)}
        return {line: id for line, due in rows.items() for id in due.values_list("pk", flat=True)[:1]}

    def take(self, limits: Mapping[str, int]) -> Mapping[str, Mapping[int, int]]:
        claimed = claiming.claim_each(self._using, self.queues, limits, get_settings().lease, self.ahead)
        self._note(claimed)
        found: dict[str, dict[int, int]] = {line: {} for line in limits}
        for id, line in claimed.labels.items():
            found[line][id] = claimed.claims[id]
        self._with_more = [line for line in self._with_more if len(found.get(line, ())) >= limits.get(line, 0)]
        return found

    def seconds_left(self, may_run: MayRun, waiting: Collection[str]) -> float:
        has_more = any(line in may_run and line not in waiting for line in self._with_more)
        return 0.0 if has_more else max(0.0, self._poll_at - time.monotonic())

    def take_in_slots(self, policy: TimeoutPolicy[Any], lines: Lines, left: int) -> claiming.Granted | None:
        """Claim due rows of `policy` with their slots, and refuse its lines until the next slots are assigned.

        None: this worker has enough of them, or another one is claiming some. At most `left`.
        """
        limit = min(lines.size(policy) - lines.in_flight[policy.label], left)
        if limit <= 0:
            lines.refuse(policy, BUSY_SECONDS)
            return None
        began, soonest = time.monotonic(), min(PREPARATION_SECONDS + 2 * self._claim_seconds, TURN_SECONDS)
        lease = get_settings().lease
        granted = claiming.claim_in_slots(
            policy, self._using, self.queues, limit=limit, seconds=lease, preparation=soonest
        )
        if granted is None:
            lines.refuse(policy, random.uniform(0.0, BUSY_SECONDS))
            return None
        self._claim_seconds = time.monotonic() - began
        self._note(granted.claimed)
        (self.without_slots.add if granted.has_more else self.without_slots.discard)(policy.label)
        # Without any, it was too early for a slot, another worker was faster, or Redis has an entry that is outdated.
        wait = granted.wait_seconds
        if policy.counts_by is not None:  # a timeout of another value that is scheduled for now does not end the wait
            wait = min(wait, POLL_SECONDS)
        lines.refuse(policy, max(wait, 0.0 if granted.slots else BUSY_SECONDS))
        return granted

    def _note(self, claimed: claiming.Claimed) -> None:
        self._skew.note_database(claimed.now)
        with self._lock:
            self._claimed.update(dict.fromkeys(claimed.claims, claimed.until))

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


class SlotQueue:
    """The works of one policy with a rate, or of one value by which it counts, in due order, and their slots.

    Or all works of policies without a rate.

    A work is bound to a slot when the slot comes. So a slot for which this process is too late delays all works, and
    does not change their order; in the end a work is left for which there is no slot. Without a rate, the slot of a
    work begins at its deadline and never ends. For the worker's own thread.
    """

    def __init__(self) -> None:
        self._works: list[tuple[float, int, Work]] = []
        self._slots: list[Slot] = []

    def add(self, work: Work) -> None:
        """Insert a work with its slot."""
        heappush(self._slots, Slot(work.begin_at, work.begin_by, work.share))
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
