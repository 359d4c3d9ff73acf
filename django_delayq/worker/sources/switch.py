"""Both sources as one: Redis while it works, the ledger while it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from django_delayq.exceptions import EngineError
from django_delayq.firing.unknown import unknown
from django_delayq.recovery.clock_skew import ClockSkew
from django_delayq.worker.health import RedisHealth
from django_delayq.worker.sources import Batch
from django_delayq.worker.sources.fairness import MIN_SHARE, Fairness
from django_delayq.worker.sources.ledger import LedgerSource
from django_delayq.worker.sources.redis import MAX_WAIT_SECONDS, RedisSource


class Sources:
    """Both sources as one. Raises the database's errors. An error of Redis only switches to the ledger.

    `queues` are served from Redis, and `only` from the ledger (None: all queues).
    """

    def __init__(
        self, health: RedisHealth, queues: Sequence[str], only: Sequence[str] | None, using: str, skew: ClockSkew
    ) -> None:
        self._health = health
        self._skew = skew
        self._redis = None if health.engine is None else RedisSource(health.engine, queues, skew)
        self._ledger = LedgerSource(using, only, skew)
        self._fairness = Fairness(self._ledger, only)
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
            self._ledger.resolve((), dict.fromkeys(others, self._skew.now()))
            raise
        # While other releases run, one of them may have deferred in Redis what only this worker can fire.
        self._fairness.note_backlog(batch.is_part or (self._redis is not None and unknown.are_about))
        deliveries = batch.deliveries
        if others:  # of two counts the higher one decides whether a timeout is a poison message
            deliveries = {**deliveries, **{id: max(count, deliveries.get(id, 0)) for id, count in others.items()}}
        # Without room the end of a handler wakes the worker, but all running handlers may be slow.
        return replace(batch, deliveries=deliveries, wait_seconds=min(batch.wait_seconds, self._fairness.seconds_left))

    def _take(self, room: int) -> Batch:
        if self._redis is None:
            return self._ledger.take(room)
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
                more = self._ledger.take(room)
                return Batch(more.deliveries, min(batch.wait_seconds, more.wait_seconds))
        if not self._health.is_up:
            return self._ledger.take(room)
        # Redis is back. It still leases entries to callers that never got the answer, so poll the ledger once more.
        batch = self._ledger.take_now(room)
        self._must_poll = batch.is_part
        return replace(batch, wait_seconds=0.0)

    def take_from_ledger(self, room: int) -> Batch:
        """Do the same as `take` with the ledger alone."""
        return self._ledger.take_now(room)

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        """Note results in both sources, because one timeout may have come from both."""
        self._ledger.resolve(done, again)
        if self._redis is not None:
            self._redis.resolve(done, again)

    def flush(self) -> None:
        """Send what `resolve` has noted. While Redis is unavailable its part waits, as long as it is of use."""
        if self._redis is not None:
            self._try(self._redis.flush)
        self._ledger.flush()

    def extend(self) -> None:
        """Extend all leases and claims that are not resolved to one `LEASE` from now."""
        if self._redis is not None:
            self._try(self._redis.extend)
        self._ledger.extend()

    def _try(self, call: Callable[[], None]) -> None:
        if self._health.is_up:
            try:
                call()
            except EngineError as error:
                self._lost(error)

    def _lost(self, error: EngineError) -> None:
        self._must_poll = True
        self._health.lost(error)
