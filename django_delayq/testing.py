"""Test support: fire due timeouts inline, without Redis and without a worker."""

from __future__ import annotations

from django_delayq.firing import Work, run, settle_expired
from django_delayq.models import Timeout
from django_delayq.policies import registry

__all__ = ["fire_due"]


def fire_due(using: str = "default", limit: int | None = None) -> int:
    """Fire everything due in this thread, in due order; return how many handlers returned normally.

    This includes what a firing makes due, also a retry that follows at once. What cannot be fired now (its object is
    locked, its policy not declared) is tried once. `django_delayq.clock.set_to` changes the time. Handlers that
    raise are recorded as a worker does: see `Timeout.errors`.

    Args:
        using: the database.
        limit: fire no more than this many.
    """
    settle_expired(using)
    fired = 0
    attempts_of: dict[int, int] = {}
    stuck: set[int] = set()
    while limit is None or fired < limit:
        due = Timeout.objects.using(using).due().exclude(pk__in=stuck).order_by("run_at", "id")
        due = due.only("policy", "object_id", "queue")
        first = due.first()
        if first is None:
            break
        rows, policy = {first.object_id: first}, registry.get(first.policy)
        if policy is not None and policy.batch:
            size = policy.batch if limit is None else min(policy.batch, limit - fired)
            for row in due.of_labels(policy.labels)[:size]:
                rows.setdefault(row.object_id, row)
        ids = tuple(row.pk for row in rows.values())
        fired += len(run(Work(first.policy, ids, tuple(rows), first.queue), using).fired)
        # A row that is still pending without another attempt would be tried again and again.
        pending = Timeout.objects.using(using).pending().filter(pk__in=ids)
        for timeout_id, attempts in pending.values_list("pk", "attempts"):
            if attempts <= attempts_of.get(timeout_id, 0):
                stuck.add(timeout_id)
            attempts_of[timeout_id] = attempts
    return fired
