"""Lease due entries from the queues in Redis, a fair share from each queue."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from django_delayq.conf import get_settings
from django_delayq.delays import counted
from django_delayq.engine import DelayQueue, Engine, Lease
from django_delayq.exceptions import EngineError
from django_delayq.firing.state import firing_state
from django_delayq.worker.clock_skew import ClockSkew
from django_delayq.worker.sources import Batch, Source

logger = logging.getLogger("django_delayq.worker")

MAX_WAIT_SECONDS: Final = 1.0
"""The delay that a lost wake-up message costs at most."""
LEAD_MS: Final = 20
"""The worker leases an entry and reads its row this long before it is due: only the firing is left at its deadline."""
AHEAD_MS: Final = 50
"""It then also leases the entries that are due within this time, so that one lease and one read serve several."""
MAX_ROUNDS: Final = 10
"""How often one pass asks a queue, so that a flood of invalid entries does not block it."""
JITTER_SECONDS: Final = 0.005
"""Spreads the checks of idle workers. A worker that waits for a deadline is on time."""
HANDICAP_SECONDS: Final = 0.2
"""A worker that has just met an unknown policy checks this much later than a worker that may know it."""


@dataclass(slots=True, eq=False)
class _Leased:
    """One lease: the ids in flight, and the results of the others that Redis does not have yet."""

    queue: DelayQueue
    lease: Lease
    expires: float
    size: int
    in_flight: set[int]
    lost: int = 0
    done: set[int] = field(default_factory=set)
    again: dict[int, datetime] = field(default_factory=dict)


class RedisSource(Source):
    """The source of due timeouts that Redis is. Raises EngineError."""

    def __init__(self, engine: Engine, queues: Iterable[str], skew: ClockSkew) -> None:
        self._engine = engine
        self._skew = skew
        self._lock = threading.RLock()
        self._check_at: dict[tuple[str, int], float] = {}
        """When to ask each queue and shard next."""
        self._turn = 0
        self._leased: list[_Leased] = []
        self._by_id: dict[int, _Leased] = {}
        self.serve(queues)

    def serve(self, queues: Iterable[str]) -> None:
        for queue in queues:
            for shard in range(self._engine.shards):
                self._check_at.setdefault((queue, shard), 0.0)

    def check_now(self) -> None:
        """Make the next `take` ask every queue."""
        for place in self._check_at:
            self._check_soon(place)

    def _check_soon(self, place: tuple[str, int]) -> None:
        """Make the next `take` ask `place`; while unknown policies are about, only after the handicap."""
        soon = time.monotonic() + HANDICAP_SECONDS if firing_state.unknown.are_about else 0.0
        self._check_at[place] = min(self._check_at[place], soon)

    def take(self, room: int) -> Batch:
        """Ask every queue that may have due entries for an equal part of the room, in turns, and then for more."""
        now = time.monotonic()
        places = list(self._check_at)
        self._turn = (self._turn + 1) % max(1, len(places))
        asked = [place for place in places[self._turn :] + places[: self._turn] if self._check_at[place] <= now]
        deliveries: dict[int, int] = {}
        for _ in range(MAX_ROUNDS):
            if not asked or len(deliveries) >= room:
                break
            share = max(1, (room - len(deliveries)) // len(asked))
            more = []
            for place in asked:
                if len(deliveries) == room:
                    more.append(place)  # its time to be asked has come and stays so
                elif self._reserve(place, min(share, room - len(deliveries)), deliveries):
                    more.append(place)
            asked = more
        wait = min(self._check_at.values(), default=MAX_WAIT_SECONDS) - time.monotonic()
        return Batch(deliveries, max(0.0, wait), is_part=bool(asked))

    def _reserve(self, place: tuple[str, int], limit: int, deliveries: dict[int, int]) -> bool:
        """Lease entries of one queue into `deliveries`; return whether it has more. After an error release all."""
        queue = self._engine.queue(*place)
        lease_seconds = get_settings().lease.total_seconds()
        asked, is_handicapped = time.monotonic(), firing_state.unknown.are_about
        with self._lock:
            # With a handicap nothing ahead: the check for another entry may come just before the deadline of this one.
            try:
                reserved = queue.reserve(limit, int(lease_seconds * 1000), 0 if is_handicapped else AHEAD_MS)
            except EngineError:  # the caller never learns what other queues have leased
                self.resolve((), dict.fromkeys(deliveries, self._skew.now()))
                raise
            if reserved.lease is not None:
                ids = {entry.id for entry in reserved.entries}
                leased = _Leased(queue, reserved.lease, asked + lease_seconds, len(ids), ids)
                self._leased.append(leased)
                for id in ids:
                    # An id that is in flight here already has lost its lease: its result counts for the new one.
                    if former := self._by_id.get(id):
                        former.in_flight.discard(id)
                    self._by_id[id] = leased
        deliveries.update((entry.id, entry.deliveries) for entry in reserved.entries)
        self._skew.note_redis(reserved.now_ms)
        next_ms = reserved.next_due_ms
        idle = MAX_WAIT_SECONDS - random.uniform(0, JITTER_SECONDS)
        wait = idle if next_ms is None else min(idle, max(0, next_ms - LEAD_MS - reserved.now_ms) / 1000)
        handicap = HANDICAP_SECONDS if is_handicapped else 0.0
        self._check_at[place] = time.monotonic() + wait + handicap if wait else 0.0
        return not wait

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        with self._lock:
            for id in done:
                if leased := self._by_id.pop(id, None):
                    leased.in_flight.discard(id)
                    leased.done.add(id)
            for id, due_at in again.items():
                if leased := self._by_id.pop(id, None):
                    leased.in_flight.discard(id)
                    leased.again[id] = due_at

    def flush(self) -> None:
        """Acknowledge and release entries. After an error they stay noted until their lease is too old to matter."""
        with self._lock:
            for leased in self._leased:
                if leased.done:
                    is_all = len(leased.done) == leased.size
                    leased.queue.acknowledge(leased.lease, None if is_all else leased.done)
                    leased.done = set()
                if leased.again:
                    due = {id: self._skew.redis_ms(due_at) for id, due_at in leased.again.items()}
                    leased.queue.release(leased.lease, due.items())
                    # An entry that is due again already is taken now, not when the current wait ends.
                    self._check_soon((leased.queue.name, self._engine.shard_of(next(iter(due)))))
                    leased.again = {}
            too_old = time.monotonic() - get_settings().lease.total_seconds()
            self._leased = [
                leased
                for leased in self._leased
                if leased.in_flight or ((leased.done or leased.again) and leased.expires > too_old)
            ]

    def extend(self) -> None:
        lease_ms = int(get_settings().lease.total_seconds() * 1000)
        with self._lock:
            for leased in self._leased:
                if not leased.in_flight or leased.lost >= len(leased.in_flight):
                    continue
                began = time.monotonic()
                leased.lease, count = leased.queue.extend(leased.lease, lease_ms)
                leased.expires = began + lease_ms / 1000
                lost, name = len(leased.in_flight) - count, leased.queue.name
                if lost > leased.lost:  # no action: the worker that has the lease now finds the row locked or settled
                    logger.warning(
                        "%s moved, cancelled or leased to others while in flight here",
                        counted(lost, f"timeout of queue {name!r} was", f"timeouts of queue {name!r} were"),
                        extra={"event": "lease_lost", "queue": name},
                    )
                leased.lost = max(lost, 0)
