"""Where due timeouts come from just now: Redis while it is there, the ledger while it is not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from django_delayq.exceptions import EngineError
from django_delayq.firing.unknown import unknown
from django_delayq.recovery.clocks import Clocks
from django_delayq.worker.link import Link
from django_delayq.worker.sources.fairness import LEAST, Shares
from django_delayq.worker.sources.ledger import Poll, Taken
from django_delayq.worker.sources.redis import LONGEST_WAIT_SECONDS, Transfer


class Sources:
    """Both sources as one. Raises the database's errors, and none of Redis: those only change the source.

    Args:
        link: told when Redis fails; believed about everything else.
        queues: which to serve.
        only: the same, or None: rows of all queues are read from the ledger.
        using: the database.
        clocks: learns both servers' moments.
    """

    def __init__(
        self, link: Link, queues: Sequence[str], only: Sequence[str] | None, using: str, clocks: Clocks
    ) -> None:
        self._link = link
        self._clocks = clocks
        self._transfer = None if link.engine is None else Transfer(link.engine, queues, clocks)
        self._poll = Poll(using, only, clocks)
        self._shares = Shares(self._poll, only)
        self._must_poll = False

    def serve(self, queues: Sequence[str]) -> None:
        """These queues are served, too."""
        if self._transfer is not None:
            self._transfer.serve(queues)

    def look_now(self) -> None:
        """What was known about when to look next is forgotten."""
        if self._transfer is not None:
            self._transfer.look_now()

    def take(self, room: int, held: Mapping[str, int] | None = None, least: int = LEAST) -> Taken:
        """About `room` due timeouts are this worker's for a while.

        Args:
            room: how many to take; without room, still some of policies that have waited behind others.
            held: how many the worker holds already, by policy.
            least: how many may be taken although there is no room.
        """
        others = self._shares.take(room, held or {}, least)
        rest = room - len(others)
        try:
            taken = self._take(rest) if rest > 0 else Taken(is_part=True, wait_seconds=LONGEST_WAIT_SECONDS)
        except Exception:
            self._poll.settle((), dict.fromkeys(others, self._clocks.now()))
            raise
        # While other releases run, one of them may have parked in Redis what only this worker can fire.
        is_behind = taken.is_part or (self._transfer is not None and unknown.are_about)
        self._shares.saw(is_behind=is_behind)
        # Without room it is woken by what ends; but all that runs may be slow, and others must not wait for it.
        wait = min(taken.wait_seconds, self._shares.seconds_left)
        return replace(taken, deliveries=_both(taken.deliveries, others), wait_seconds=wait)

    def _take(self, room: int) -> Taken:
        if self._transfer is None:
            return self._poll.take(room)
        if self._link.is_up and not self._must_poll:
            try:
                taken = self._transfer.take(room)
                return self._and_what_redis_lacks(taken, room) if self._link.is_full else taken
            except EngineError as error:
                self._lost(error)
        if not self._link.is_up:
            return self._poll.take(room)
        # Redis is back. What it had leased to somebody whose answer was lost, it keeps for a while: so one look more.
        taken = self._poll.look(room)
        self._must_poll = taken.is_part
        return replace(taken, wait_seconds=0.0)

    def _and_what_redis_lacks(self, taken: Taken, room: int) -> Taken:
        """Only when Redis gives nothing: an error of the database must not leave what was leased with nobody."""
        if taken.deliveries or not taken.wait_seconds:
            return taken
        more = self._poll.take(room)
        return Taken(more.deliveries, min(taken.wait_seconds, more.wait_seconds))

    def look_into_ledger(self, room: int) -> Taken:
        """As `take`, but by what the ledger says, whatever Redis says."""
        return self._poll.look(room)

    def settle(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        """Takes note. Both are told: what came from one may have come from the other too, while it was under way."""
        self._poll.settle(done, again)
        if self._transfer is not None:
            self._transfer.settle(done, again)

    def flush(self) -> None:
        """What was noted is told. What Redis cannot be told now waits for it, as long as it matters."""
        if self._transfer is not None and self._link.is_up:
            try:
                self._transfer.flush()
            except EngineError as error:
                self._lost(error)
        self._poll.flush()

    def extend(self) -> None:
        """What is held stays so for one `LEASE` from now."""
        if self._transfer is not None and self._link.is_up:
            try:
                self._transfer.extend()
            except EngineError as error:
                self._lost(error)
        self._poll.extend()

    def _lost(self, error: EngineError) -> None:
        self._must_poll = True
        self._link.lost(error)


def _both(some: Mapping[int, int], others: Mapping[int, int]) -> Mapping[int, int]:
    """The deliveries of both; what either of them has given out in vain before, is suspect."""
    return {**some, **{id: max(count, some.get(id, 0)) for id, count in others.items()}} if others else some
