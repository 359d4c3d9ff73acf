"""Counters of a policy that all workers share: one row of the ledger for each policy and name, written under a lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.models import PolicyMeter

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_delayq.policy_options import Rate

AHEAD_SECONDS: Final = 1.0
"""How far ahead of time slots are assigned. A worker that dies loses that many of them at most."""
TURN_SECONDS: Final = 0.5
"""How long before the next free slot it is assigned. Until then the worker that got the last ones fires in order."""
LATENESS_PART: Final = 16
MIN_LATENESS_SECONDS: Final = 0.01
MAX_LATENESS_SECONDS: Final = 2.0


class Slot(NamedTuple):
    """From when until when one work of a policy with a rate may begin, by `time.monotonic()` of this process.

    Not the column `slot` of a timeout, which at most one pending timeout may hold.
    """

    begin_at: float
    begin_by: float


@dataclass(frozen=True, slots=True)
class Spacing:
    """The slots in which works of a policy with a rate begin: one each `interval` seconds, for `size` timeouts at most.

    A work begins a little later than its slot, by at most `lateness` seconds; then the slot is lost. The interval
    includes that: a slot, and the first one that would be too many in a period, lie a period plus `lateness` apart.
    A part of it is left for the step from the last check to the handler.
    """

    size: int
    interval: float
    lateness: float

    @classmethod
    def of(cls, rate: Rate, batch: int | None = None) -> Spacing:
        """Return the spacing for works of at most `batch` timeouts, None: of one."""
        works, period = -(-rate.count // (batch or 1)), rate.per.total_seconds()
        lateness = min(max(period / LATENESS_PART, MIN_LATENESS_SECONDS), MAX_LATENESS_SECONDS)
        return cls(rate.count // works, (period + lateness) / works, lateness)

    def slots(self, free_in: float, soonest: float, works: int) -> list[float]:
        """Return in how many seconds at most `works` works may begin; [] if it is too early to ask.

        Args:
            free_in: when the first slot is free that is not assigned. No slot is assigned so far ahead that it can be
                much later than `AHEAD_SECONDS` and an interval: then the clock was set back, or the rate was lower.
            soonest: how long the caller needs to prepare a work.
        """
        first = soonest if free_in > AHEAD_SECONDS + self.interval + 0.1 else max(soonest, free_in)
        if first > TURN_SECONDS:
            return []
        count = min(works, 1 + int((AHEAD_SECONDS - first) / self.interval))
        return [first + number * self.interval for number in range(count)]

    def slot(self, at: float) -> Slot:
        """Return the slot that begins `at`."""
        return Slot(at, at + 0.7 * self.lateness)

    def works(self, timeouts: int) -> int:
        """Return how many works so many timeouts need."""
        return -(-timeouts // self.size)


@contextmanager
def meter(policy: str, name: str, using: str, *, wait: bool = True) -> Iterator[dict[str, Any] | None]:
    """Lock a counter and yield its state, plain types for JSON; store what the block changes in it.

    The block runs in a transaction of its own, which locks the row until it commits: keep it short. An exception rolls
    everything back, and leaves the counter as it was.

    Args:
        policy: the present label of the policy.
        name: which counter of the policy; it is created, with an empty state, at its first use.
        using: the database.
        wait: False: yield None if another transaction has locked the counter.

    Raises:
        django.db.Error: the database failed.
    """
    while True:
        with transaction_of(using):
            row = next(iter(for_update(_rows(policy, name, using), using, wait=wait)), None)
            if row is not None:
                before = deepcopy(row.state)
                yield row.state
                if row.state != before:
                    _rows(policy, name, using).update(state=row.state)
                return
        if _rows(policy, name, using).exists():  # with `wait` it was created meanwhile
            if not wait:
                yield None
                return
        else:
            # Outside the transaction: where two workers insert it at once, InnoDB would let both lock it, and then
            # abort one that wants to write.
            PolicyMeter.objects.using(using).bulk_create([PolicyMeter(policy=policy, name=name)], ignore_conflicts=True)


def _rows(policy: str, name: str, using: str) -> QuerySet[PolicyMeter]:
    return PolicyMeter.objects.using(using).filter(policy=policy, name=name)
