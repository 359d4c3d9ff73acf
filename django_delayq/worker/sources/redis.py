"""Lease due entries from Redis, a fair share from each queue.

`Sources` turns to the ledger while Redis does not work.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from django_delayq.clock import plural
from django_delayq.conf import get_settings
from django_delayq.engine.engine import DelayQueue, Engine, Lease
from django_delayq.exceptions import EngineError
from django_delayq.firing.state import firing_state
from django_delayq.policies import registry
from django_delayq.worker.servers import ClockSkew, RedisHealth
from django_delayq.worker.sources.ledger import Batch, LedgerSource, PacedSource

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


class RedisSource:
    """The source of due timeouts that Redis is; without an engine it has none. Raises EngineError."""

    def __init__(self, engine: Engine | None, queues: Iterable[str], skew: ClockSkew) -> None:
        self._engine = engine
        self._skew = skew
        self._lock = threading.RLock()
        self._check_at: dict[DelayQueue, float] = {}
        """When to ask each queue and shard next."""
        self._heads: dict[DelayQueue, Mapping[str, int]] = {}
        """The lines of each that had work soon when it was asked last; without it, to be asked first."""
        self._turn = 0
        self._leased: list[_Leased] = []
        self._by_id: dict[int, _Leased] = {}
        self.serve(queues)

    def serve(self, queues: Iterable[str]) -> None:
        for queue in [] if self._engine is None else self._engine.queues(queues):
            self._check_at.setdefault(queue, 0.0)

    def check_now(self) -> None:
        """Make the next `take` ask every queue."""
        for queue in self._check_at:
            self._check_soon(queue)

    def _check_soon(self, queue: DelayQueue) -> None:
        """Make the next `take` ask `queue`; while unknown policies are about, only after the handicap."""
        self._heads.pop(queue, None)
        soon = time.monotonic() + HANDICAP_SECONDS if firing_state.unknown.are_about else 0.0
        self._check_at[queue] = min(self._check_at[queue], soon)

    def take(self, room: int) -> Batch:
        """Ask every queue that may have due entries for an equal part of the room, in turns, and then for more."""
        now = time.monotonic()
        queues = list(self._check_at)
        self._turn = (self._turn + 1) % max(1, len(queues))
        asked = [queue for queue in queues[self._turn :] + queues[: self._turn] if self._check_at[queue] <= now]
        deliveries: dict[int, int] = {}
        for _ in range(MAX_ROUNDS):
            if not asked or len(deliveries) >= room:
                break
            share = max(1, (room - len(deliveries)) // len(asked))
            more = []
            for queue in asked:
                left = room - len(deliveries)
                if not left or self._reserve(queue, min(share, left), deliveries):
                    more.append(queue)  # without room, its time to be asked has come and stays so
            asked = more
        wait = min(self._check_at.values(), default=MAX_WAIT_SECONDS) - time.monotonic()
        return Batch(deliveries, max(0.0, wait), is_part=bool(asked))

    def _reserve(self, queue: DelayQueue, limit: int, deliveries: dict[int, int]) -> bool:
        """Lease entries of one queue into `deliveries`, of the lines that its last answer named.

        Return whether it has more. After an error release all.
        """
        lease_seconds = get_settings().lease.total_seconds()
        lease_ms = int(lease_seconds * 1000)
        asked, is_handicapped = time.monotonic(), firing_state.unknown.are_about
        with self._lock:
            # With a handicap nothing ahead: the check for another entry may come just before the deadline of this one.
            try:
                if (heads := self._heads.get(queue)) is None:
                    heads = queue.reserve({}, lease_ms).heads
                lines = sorted(heads, key=heads.__getitem__)[:limit]
                limits = dict.fromkeys(lines, max(1, limit // max(1, len(lines))))
                reserved = queue.reserve(limits, lease_ms, 0 if is_handicapped else AHEAD_MS)
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
        self._heads[queue] = reserved.heads
        next_ms = min(reserved.heads.values(), default=None)
        idle = MAX_WAIT_SECONDS - random.uniform(0, JITTER_SECONDS)
        wait = idle if next_ms is None else min(idle, max(0, next_ms - LEAD_MS - reserved.now_ms) / 1000)
        handicap = HANDICAP_SECONDS if is_handicapped else 0.0
        self._check_at[queue] = time.monotonic() + wait + handicap if wait else 0.0
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
                    self._check_soon(leased.queue)
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
                        plural(lost, f"timeout of queue {name!r} was", f"timeouts of queue {name!r} were"),
                        extra={"event": "lease_lost", "queue": name},
                    )
                leased.lost = max(lost, 0)


FIRST_CHECK_SECONDS: Final = 0.1
LONGEST_CHECK_SECONDS: Final = 0.25
"""The time from the start of a backlog to the first check, and between two checks: it grows while they find nothing."""
MAX_COST: Final = 0.1
MAX_COST_SECONDS: Final = 1.0
"""The checks may take this part of the time of the worker's own thread; but none waits longer than this for it."""
MIN_SHARE: Final = 25
"""How many timeouts of each policy may be in flight, and one check may claim, however little room there is."""
MAX_LABELS: Final = 50
"""How many labels one query asks for. Where there are more, they take turns."""


class Sources:
    """Both sources as one. Raises the database's errors. An error of Redis only switches to the ledger.

    `queues` are served from Redis, and `only` from the ledger (None: all queues).
    """

    def __init__(
        self, health: RedisHealth, queues: Sequence[str], only: Sequence[str] | None, using: str, skew: ClockSkew
    ) -> None:
        self._health = health
        self.redis = RedisSource(health.engine, queues, skew)
        self.ledger = LedgerSource(using, only, skew)
        self._fairness = Fairness(self.ledger)
        self.paced = PacedSource(self.ledger)
        self._must_poll = False

    def take(self, room: int, in_flight: Mapping[str, int], left: int = MIN_SHARE) -> Batch:
        """Lease or claim about `room` due timeouts, and without room some of underserved policies, but at most `left`.

        `in_flight` is how many timeouts the worker has already, by policy.
        """
        others = self._fairness.take(room, in_flight, left)
        rest = room - len(others)
        try:
            # Without room the end of a handler wakes the worker, but all running handlers may be slow.
            batch = self._take(rest) if rest > 0 else Batch(is_part=True, wait_seconds=MAX_WAIT_SECONDS)
        except Exception:
            self.ledger.release(others)
            raise
        # While other releases run, one of them may have deferred in Redis what only this worker can fire.
        may_be_deferred = self._health.engine is not None and firing_state.unknown.are_about
        self._fairness.note_backlog(batch.is_part or may_be_deferred)
        # Of two counts the higher one decides whether a timeout is a poison message.
        counts = {id: max(count, batch.deliveries.get(id, 0)) for id, count in others.items()}
        deliveries = {**batch.deliveries, **counts}
        return replace(batch, deliveries=deliveries, wait_seconds=min(batch.wait_seconds, self._fairness.seconds_left))

    def _take(self, room: int) -> Batch:
        if self._health.is_up and not self._must_poll:
            try:
                batch = self.redis.take(room)
            except EngineError as error:
                self._lost(error)
            else:
                # A full Redis lacks entries. The ledger is read only when Redis returns none, because an error of the
                # database would lose those that were leased.
                if not self._health.is_full or batch.deliveries or not batch.wait_seconds:
                    return batch
                more = self.ledger.take(room)
                return Batch(more.deliveries, min(batch.wait_seconds, more.wait_seconds))
        if not self._health.is_up:
            return self.ledger.take(room)
        # Redis is back. It still leases entries to callers that never got the answer, so poll the ledger once more.
        batch = self.ledger.take_now(room)
        self._must_poll = batch.is_part
        return replace(batch, wait_seconds=0.0)

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        """Note results in both sources, because one timeout may have come from both."""
        self.ledger.resolve(done, again)
        self.redis.resolve(done, again)

    def flush(self) -> None:
        """Send what `resolve` has noted. While Redis is unavailable its part waits, as long as it is of use."""
        self._try(self.redis.flush)
        self.ledger.flush()

    def extend(self) -> None:
        """Extend all leases and claims that are not resolved to one `LEASE` from now."""
        self._try(self.redis.extend)
        self.ledger.extend()

    def _try(self, call: Callable[[], None]) -> None:
        if self._health.is_up:
            try:
                call()
            except EngineError as error:
                self._lost(error)

    def _lost(self, error: EngineError) -> None:
        self._must_poll = True
        self._health.lost(error)


class Fairness:
    """Claim due rows of underserved policies: no policy waits behind the backlog of another one.

    Redis delivers by due time, and so does a poll of the ledger. Behind 100,000 timeouts that fall due at once, a
    timeout that is due a second later would come last. So a worker with a backlog asks the ledger, by an index, which
    policies are underserved: they have due timeouts, but few of them in this worker. It claims some of these, the
    longest due first. Redis is not informed: an entry that is still there is found settled when its turn comes.

    For the worker's own thread.
    """

    def __init__(self, ledger: LedgerSource) -> None:
        self._ledger = ledger
        self._check_at = math.inf
        self._pause = FIRST_CHECK_SECONDS
        self._turn = 0

    def note_backlog(self, has_backlog: bool) -> None:
        """Note whether the worker had to leave due timeouts behind."""
        if not has_backlog:
            self._check_at, self._pause = math.inf, FIRST_CHECK_SECONDS
        elif self._check_at == math.inf:
            self._check_at = time.monotonic() + self._pause

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next check. Infinite without a backlog."""
        return max(0.0, self._check_at - time.monotonic())

    def take(self, room: int, in_flight: Mapping[str, int], left: int = MIN_SHARE) -> Mapping[int, int]:
        """Claim about `room` due rows of policies that have less than half of a fair share; return their deliveries.

        A policy with half of all running handlers is the backlog itself, however few if its handlers are slow.
        Without room up to `MIN_SHARE` are claimed, but at most `left`, which the worker may still fire before it ends.
        `in_flight` is how many timeouts the worker has, by policy.
        Raises the database's errors.
        """
        budget = max(room, min(MIN_SHARE, left))
        if self.seconds_left or budget <= 0:
            return {}
        began = time.monotonic()
        total = room + sum(in_flight.values())
        share = max(MIN_SHARE, total // (len(in_flight) + 1))
        few = min(share, sum(in_flight.values()) or share) / 2
        underserved = [label for policy, label in self._labels() if in_flight.get(policy, 0) < few]
        claims: Mapping[int, int] = {}
        if found := self._ledger.labels_with_due(underserved)[:budget]:
            share = max(MIN_SHARE, total // len({*in_flight, *found}))
            claims = self._ledger.take_of(dict.fromkeys(found, min(share, max(1, budget // len(found)))))
        self._pause = FIRST_CHECK_SECONDS if claims else min(2 * self._pause, LONGEST_CHECK_SECONDS)
        now = time.monotonic()
        self._check_at = now + max(self._pause, min((now - began) * (1 / MAX_COST - 1), MAX_COST_SECONDS))
        return claims

    def _labels(self) -> Sequence[tuple[str, str]]:
        """Return pairs of a served policy and one of its labels, in turns at most as many as one query may ask for."""
        only = self._ledger.queues
        served = [policy for policy in registry if policy.rate is None and (only is None or policy.queue in only)]
        pairs = [(policy.label, label) for policy in served for label in policy.labels]
        self._turn = (self._turn + MAX_LABELS) % max(1, len(pairs)) if len(pairs) > MAX_LABELS else 0
        return (pairs[self._turn :] + pairs[: self._turn])[:MAX_LABELS]
