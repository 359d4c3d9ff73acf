"""One pass over the queues in Redis: what is due is leased to this worker, from each queue its fair share."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from django_delayq.conf import get_settings
from django_delayq.engine import DelayQueue, Engine, Lease
from django_delayq.firing.unknown import unknown
from django_delayq.recovery.clocks import Clocks
from django_delayq.worker.sources.ledger import Taken

logger = logging.getLogger("django_delayq.worker")

LONGEST_WAIT_SECONDS: Final = 1.0
"""A wake-up may be lost without a sign; this is what it then costs."""
AHEAD_MS: Final = 5
"""An entry is leased, and its row read, this long before it is due: so its deadline finds all but the firing done."""
MOST_ROUNDS: Final = 10
"""How often one pass asks a queue: somebody who fills it with garbage must not keep us here."""
JITTER_SECONDS: Final = 0.005
"""Workers that wait for nothing in particular do not all come at once. Who waits for a deadline comes on time."""

HANDICAP_SECONDS: Final = 0.2
"""A worker that has just met a policy which it does not know looks so much later than one that may know it."""


@dataclass(slots=True, eq=False)
class _Held:
    """What is left of one lease: ids under way, and what is to be told about the others."""

    queue: DelayQueue
    lease: Lease
    expires: float
    size: int
    under_way: set[int]
    lost: int = 0
    done: set[int] = field(default_factory=set)
    again: dict[int, datetime] = field(default_factory=dict)


class Transfer:
    """The source of due timeouts that Redis is. `settle` only takes note; `flush` tells.

    Threads share an instance. `take`, `flush` and `extend` raise EngineError, and may be repeated then.
    """

    def __init__(self, engine: Engine, queues: Iterable[str], clocks: Clocks) -> None:
        self._engine = engine
        self._clocks = clocks
        self._lock = threading.RLock()
        self._look_at: dict[tuple[str, int], float] = {}
        self._turn = 0
        self._held: list[_Held] = []
        self._by_id: dict[int, _Held] = {}
        self.serve(queues)

    def serve(self, queues: Iterable[str]) -> None:
        """These queues are looked at, too."""
        for queue in queues:
            for shard in range(self._engine.shards):
                self._look_at.setdefault((queue, shard), 0.0)

    def look_now(self) -> None:
        """The next `take` looks at every queue, whatever was known of them."""
        for place in self._look_at:
            self._look_soon(place)

    def _look_soon(self, place: tuple[str, int]) -> None:
        """The next `take` looks at `place`; if unknown policies are about, the one after the handicap."""
        soon = time.monotonic() + HANDICAP_SECONDS if unknown.are_about else 0.0
        self._look_at[place] = min(self._look_at[place], soon)

    def take(self, room: int) -> Taken:
        """Every queue that may have something due is asked, in turns, for a share of the room; then for more."""
        now = time.monotonic()
        asked = [place for place in self._in_turn() if self._look_at[place] <= now]
        deliveries: dict[int, int] = {}
        for _ in range(MOST_ROUNDS):
            if not asked or len(deliveries) >= room:
                break
            share = max(1, (room - len(deliveries)) // len(asked))
            more = []
            for place in asked:
                if len(deliveries) == room:
                    more.append(place)  # it keeps its turn: its time to be looked at has come and stays so
                elif self._reserve(place, min(share, room - len(deliveries)), deliveries):
                    more.append(place)
            asked = more
        wait = min(self._look_at.values(), default=LONGEST_WAIT_SECONDS) - time.monotonic()
        return Taken(deliveries, max(0.0, wait), is_part=bool(asked))

    def _in_turn(self) -> Sequence[tuple[str, int]]:
        places = list(self._look_at)
        self._turn = (self._turn + 1) % max(1, len(places))
        return places[self._turn :] + places[: self._turn]

    def _reserve(self, place: tuple[str, int], limit: int, deliveries: dict[int, int]) -> bool:
        """Whether there is more where this came from."""
        queue = self._engine.queue(*place)
        lease_seconds = get_settings().lease.total_seconds()
        asked = time.monotonic()
        with self._lock:
            reserved = queue.reserve(limit, int(lease_seconds * 1000), AHEAD_MS)
            if reserved.lease is not None:
                ids = {entry.id for entry in reserved.entries}
                held = _Held(queue, reserved.lease, asked + lease_seconds, len(ids), ids)
                self._hold(held)
        deliveries.update((entry.id, entry.deliveries) for entry in reserved.entries)
        self._clocks.saw_redis(reserved.now_ms)
        next_ms = reserved.next_due_ms
        idle = LONGEST_WAIT_SECONDS - random.uniform(0, JITTER_SECONDS)
        wait = idle if next_ms is None else min(idle, max(0, next_ms - AHEAD_MS - reserved.now_ms) / 1000)
        handicap = HANDICAP_SECONDS if unknown.are_about else 0.0
        self._look_at[place] = time.monotonic() + wait + handicap if wait else 0.0
        return not wait

    def _hold(self, held: _Held) -> None:
        """An id that is under way here already lost its lease meanwhile: what becomes of it counts for the new one."""
        self._held.append(held)
        for id in held.under_way:
            former = self._by_id.get(id)
            if former is not None:
                former.under_way.discard(id)
            self._by_id[id] = held

    def settle(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        """Whatever of these is leased here need not be any more; `again` comes back at its moments."""
        with self._lock:
            for id in done:
                if held := self._by_id.pop(id, None):
                    held.under_way.discard(id)
                    held.done.add(id)
            for id, moment in again.items():
                if held := self._by_id.pop(id, None):
                    held.under_way.discard(id)
                    held.again[id] = moment

    def flush(self) -> None:
        """What was settled is told. What cannot be told now stays noted, unless it has become too old to matter."""
        with self._lock:
            for held in self._held:
                if held.done or held.again:
                    self._tell(held)
            too_old = time.monotonic() - get_settings().lease.total_seconds()
            self._held = [held for held in self._held if held.under_way or _is_noted(held, too_old)]

    def _tell(self, held: _Held) -> None:
        if held.done:
            is_all = len(held.done) == held.size
            held.queue.acknowledge(held.lease, None if is_all else held.done)
            held.done = set()
        if held.again:
            due = {id: self._clocks.redis_ms(moment) for id, moment in held.again.items()}
            held.queue.release(held.lease, due.items())
            # Who is told to look again at a moment that has passed looks now, and not when the next timer ends.
            self._look_soon((held.queue.name, self._engine.shard_of(next(iter(due)))))
            held.again = {}

    def extend(self) -> None:
        """Everything leased here and not settled stays so for one `LEASE` from now."""
        lease_ms = int(get_settings().lease.total_seconds() * 1000)
        with self._lock:
            for held in self._held:
                if held.under_way and held.lost < len(held.under_way):
                    began = time.monotonic()
                    held.lease, count = held.queue.extend(held.lease, lease_ms)
                    held.expires = began + lease_ms / 1000
                    _tell_lost(held, len(held.under_way) - count)


def _tell_lost(held: _Held, lost: int) -> None:
    """Nothing is to be done about it: whoever has the lease now looks at the row, and finds it locked or settled."""
    if lost > held.lost:
        logger.warning(
            "%d timeouts of queue %r were moved, cancelled or given to others while this worker fires them",
            lost,
            held.queue.name,
            extra={"event": "lease_lost", "queue": held.queue.name},
        )
    held.lost = max(lost, 0)


def _is_noted(held: _Held, too_old: float) -> bool:
    return bool(held.done or held.again) and held.expires > too_old
