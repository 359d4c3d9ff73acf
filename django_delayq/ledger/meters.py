"""Counters of a policy that all workers share: one row of the ledger for each policy and name, written under a lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.models import PolicyMeter

if TYPE_CHECKING:
    from django.db.models import QuerySet


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
