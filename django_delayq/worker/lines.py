"""Which lines a worker may ask now, and for how many timeouts each.

A line has the timeouts of one label: in Redis a sorted set, in the ledger a part of an index. Those that may not fire
here and now are not asked for, so they cost nothing and delay no other policy: those of policies that are not declared
in this process, that are stopped, whose rate leaves no slot, or that are left to workers with a free thread.

This decides nothing: a policy may be stopped meanwhile. The statement that marks a timeout as fired checks again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django_delayq.ledger.controls import stop_cache
from django_delayq.policy.policies import registry

if TYPE_CHECKING:
    from django_delayq.policy.policies import TimeoutPolicy

MAX_TAKEN: Final = 1_000
"""How many timeouts a worker reserves in advance at most: more would cost a restart of the worker too much."""
MayRun: TypeAlias = "Mapping[str, TimeoutPolicy[Any]]"
"""Labels, each with its policy."""


class Lines:
    """What one worker has of each policy, and may take. For the worker's own thread.

    It asks for as many timeouts of each policy as it has completed within the last `seconds`, and at least for those
    that its threads can begin at once. So a backlog of quick ones is read in large pieces, and slow ones are left to
    other workers.
    """

    def __init__(self, using: str, threads: int, seconds: float) -> None:
        self._using = using
        self._threads = threads
        self._seconds = seconds
        self.in_flight: Counter[str] = Counter()
        """How many timeouts the worker has, by policy."""
        self._refused_until: dict[str, float] = {}
        self._left_until: dict[str, float] = {}
        """Until when the lines of each policy are left to other workers, by its present label."""
        self._completed: Counter[str] = Counter()
        self._completed_before: Counter[str] = Counter()
        """By policy, in the present period of `seconds` and in the one before."""
        self._period_ends = 0.0
        self._turn = 0

    def may_run(self, *, by_last_answer: bool = False) -> MayRun:
        """Return the lines that may be asked: declared here, not stopped, refused for their rate, or left to others.

        `by_last_answer`: of the ledger, however old, and without a query. Otherwise it is a second old at most.
        """
        changes = stop_cache.last(self._using) if by_last_answer else stop_cache.recent(self._using)
        stopped = changes.stopped_now()
        return {label: policy for label, policy in self.declared().items() if policy.label not in stopped}

    def declared(self, soon_seconds: float = 0.0) -> MayRun:
        """Return the lines of all policies that are declared here, not refused for their rate, nor left to others.

        `soon_seconds`: also those that are refused or left for no longer than that.
        """
        now = time.monotonic()
        self._refused_until = {label: until for label, until in self._refused_until.items() if until > now}
        self._left_until = {label: until for label, until in self._left_until.items() if until > now}
        ends = (*self._refused_until.items(), *self._left_until.items())
        avoided = {label for label, until in ends if until > now + soon_seconds}
        free = (policy for policy in registry if policy.label not in avoided)
        return {label: policy for policy in free for label in policy.labels}

    def refuse(self, policy: TimeoutPolicy[Any], seconds: float) -> None:
        """Leave out the lines of `policy`, whose rate leaves no slot, for so long."""
        self._refused_until[policy.label] = time.monotonic() + seconds

    def leave(self, label: str, seconds: float) -> None:
        """Leave the lines of a policy to other workers for so long, or until a timeout completes here.

        This worker has released some that its threads could not begin. It would take them again before any other one
        has asked.
        """
        self._left_until[label] = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Return how long it is until a line is no longer refused, or left to others; infinite if none is."""
        ends = [*self._refused_until.values(), *self._left_until.values()]
        return max(0.0, min(ends, default=inf) - time.monotonic())

    def completed(self, policy: str, count: int) -> None:
        """Note that so many timeouts of `policy` were completed: a thread is free."""
        self._left_until.clear()
        self._begin_period()
        self._completed[policy] += count

    def _begin_period(self) -> None:
        now = time.monotonic()
        if now >= self._period_ends:
            is_next = now < self._period_ends + self._seconds
            self._completed_before = self._completed if is_next else Counter()
            self._completed, self._period_ends = Counter(), now + self._seconds

    def size(self, policy: TimeoutPolicy[Any]) -> int:
        """Return how many timeouts of `policy` the worker may have."""
        self._begin_period()
        recent = max(self._completed[policy.label], self._completed_before[policy.label])
        return min(MAX_TAKEN, max(recent, self._threads * policy.transaction_size))

    def enough(self) -> Counter[str]:
        """Return how many timeouts of each policy must complete before more of it are worth a round trip.

        One, unless as many others wait as its threads can begin at once.
        """
        much = {policy.label: 2 * self._threads * policy.transaction_size for policy in registry}
        return Counter({label: n // 4 if n >= much.get(label, inf) else 1 for label, n in self.in_flight.items()})

    def limits(self, due: Iterable[str], may_run: MayRun, taken: Mapping[str, int], left: int) -> dict[str, int]:
        """Return for how many timeouts to ask each of the lines `due`: a fair share of the room for each policy.

        Policies of which the worker has least come first, and in turns, where there is not enough for all. One of
        which it has none gets some in any case, as it must not wait until the backlog of another one leaves room; but
        no more than two of these for each thread.

        Args:
            due: lines that have due timeouts. Those of policies with a rate are ignored.
            may_run: what may be asked.
            taken: what the worker has taken in this pass, by policy, and is not `in_flight` yet.
            left: how many timeouts it may take together.
        """
        lines: dict[TimeoutPolicy[Any], list[str]] = {}
        for label in due:
            if (policy := may_run.get(label)) is not None and policy.rate is None:
                lines.setdefault(policy, []).append(label)
        if not lines:
            return {}
        paced = {policy.label for policy in registry if policy.rate}  # most of their timeouts wait for slots
        has = Counter({label: count for label, count in self.in_flight.items() if label not in paced})
        has.update(taken)
        sizes = {policy: self.size(policy) for policy in lines}
        size = max(*sizes.values(), min(MAX_TAKEN, max(self._completed.total(), self._completed_before.total())))
        room = size - has.total()
        room = room if room >= max(1, size // 4) else 0  # less is not worth a round trip
        # However much it has of others, that was quick when it was taken: it may have become slow.
        spare = 2 * self._threads - sum(count == 1 for count in has.values())
        self._turn += 1
        turned, first = list(lines), self._turn % len(lines)
        found: dict[str, int] = {}
        in_turn = sorted(turned[first:] + turned[:first], key=lambda policy: has[policy.label])
        for place, policy in enumerate(in_turn):
            share = room // len(lines) + (place < room % len(lines))
            share = min(share, sizes[policy] - has[policy.label])
            if not has[policy.label] and spare > 0:
                share, spare = max(share, policy.transaction_size), spare - 1
            for label in lines[policy]:
                limit = min(-(-share // len(lines[policy])), left)
                if limit > 0:
                    found[label], left = limit, left - limit
        return found
