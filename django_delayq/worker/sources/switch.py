"""Both sources as one: Redis while it works, the ledger while it does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from django_delayq.exceptions import EngineError
from django_delayq.firing.state import firing_state
from django_delayq.policies import registry
from django_delayq.worker.clock_skew import ClockSkew
from django_delayq.worker.health import RedisHealth
from django_delayq.worker.sources import Batch
from django_delayq.worker.sources.ledger import LedgerSource, PacedSource
from django_delayq.worker.sources.redis import MAX_WAIT_SECONDS, RedisSource

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 0.25
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
        self._redis = None if health.engine is None else RedisSource(health.engine, queues, skew)
        self.ledger = LedgerSource(using, only, skew)
        self._fairness = Fairness(self.ledger, only)
        self.paced = PacedSource(self.ledger)
        self._must_poll = False

    def serve(self, queues: Sequence[str]) -> None:
        if self._redis is not None:
            self._redis.serve(queues)

    def check_now(self) -> None:
        """Make the next `take` ask every queue in Redis."""
        if self._redis is not None:
            self._redis.check_now()

    def take(self, room: int, in_flight: Mapping[str, int] | None = None, least: int = MIN_SHARE) -> Batch:
        """Lease or claim about `room` due timeouts, and without room up to `least` of underserved policies.

        `in_flight` is how many timeouts the worker has already, by policy.
        """
        others = self._fairness.take(room, in_flight or {}, least)
        rest = room - len(others)
        try:
            batch = self._take(rest) if rest > 0 else Batch(is_part=True, wait_seconds=MAX_WAIT_SECONDS)
        except Exception:
            self.ledger.release(others)
            raise
        # While other releases run, one of them may have deferred in Redis what only this worker can fire.
        self._fairness.note_backlog(batch.is_part or (self._redis is not None and firing_state.unknown.are_about))
        deliveries = batch.deliveries
        if others:  # of two counts the higher one decides whether a timeout is a poison message
            deliveries = {**deliveries, **{id: max(count, deliveries.get(id, 0)) for id, count in others.items()}}
        # Without room the end of a handler wakes the worker, but all running handlers may be slow.
        return replace(batch, deliveries=deliveries, wait_seconds=min(batch.wait_seconds, self._fairness.seconds_left))

    def _take(self, room: int) -> Batch:
        if self._redis is None:
            return self.ledger.take(room)
        if self._health.is_up and not self._must_poll:
            try:
                batch = self._redis.take(room)
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
        if self._redis is not None:
            self._redis.resolve(done, again)

    def flush(self) -> None:
        """Send what `resolve` has noted. While Redis is unavailable its part waits, as long as it is of use."""
        if self._redis is not None:
            self._try(self._redis.flush)
        self.ledger.flush()

    def extend(self) -> None:
        """Extend all leases and claims that are not resolved to one `LEASE` from now."""
        if self._redis is not None:
            self._try(self._redis.extend)
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

    `only` names the queues (None: all). For the worker's own thread.
    """

    def __init__(self, ledger: LedgerSource, only: Sequence[str] | None) -> None:
        self._ledger = ledger
        self._only = only
        self._check_at = math.inf
        self._pause = FIRST_SECONDS
        self._turn = 0

    def note_backlog(self, has_backlog: bool) -> None:
        """Note whether the worker had to leave due timeouts behind."""
        if not has_backlog:
            self._check_at, self._pause = math.inf, FIRST_SECONDS
        elif self._check_at == math.inf:
            self._check_at = time.monotonic() + self._pause

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next check. Infinite without a backlog."""
        return max(0.0, self._check_at - time.monotonic())

    def take(self, room: int, in_flight: Mapping[str, int], least: int = MIN_SHARE) -> Mapping[int, int]:
        """Claim about `room` due rows of policies that have less than half of a fair share; return their deliveries.

        A policy with half of all running handlers is the backlog itself, however few if its handlers are slow.
        Up to `least` are claimed although there is no room. `in_flight` is how many timeouts the worker has, by policy.
        Raises the database's errors.
        """
        budget = max(room, min(MIN_SHARE, least))
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
        self._pause = FIRST_SECONDS if claims else min(2 * self._pause, LONGEST_SECONDS)
        now = time.monotonic()
        self._check_at = now + max(self._pause, min((now - began) * (1 / MAX_COST - 1), MAX_COST_SECONDS))
        return claims

    def _labels(self) -> Sequence[tuple[str, str]]:
        """Return pairs of a served policy and one of its labels, in turns at most as many as one query may ask for."""
        served = [policy for policy in registry if self._only is None or policy.queue in self._only]
        served = [policy for policy in served if policy.rate is None]
        pairs = [(policy.label, label) for policy in served for label in policy.labels]
        self._turn = (self._turn + MAX_LABELS) % max(1, len(pairs)) if len(pairs) > MAX_LABELS else 0
        return (pairs[self._turn :] + pairs[: self._turn])[:MAX_LABELS]
