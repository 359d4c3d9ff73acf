"""Test support: fire due timeouts inline, without Redis and without a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_delayq.firing import Work, run, settle_expired
from django_delayq.ledger.statements import compiled, padded, params
from django_delayq.models import Timeout
from django_delayq.policies import registry

if TYPE_CHECKING:
    from django.db.models import QuerySet

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
        excluded = padded(stuck)
        due = _due.rows(using, 1, None, len(excluded), id=excluded)
        if not due:
            break
        label, queue = due[0][:2]
        policy = registry.get(label)
        if policy is not None and policy.batch:
            size = policy.batch if limit is None else min(policy.batch, limit - fired)
            due += _due.rows(using, size, policy.labels, len(excluded), id=excluded)
        rows: dict[str, int] = {}
        for _, _, object_id, timeout_id in due:
            rows.setdefault(object_id, timeout_id)
        report = run(Work(label, tuple(rows.values()), tuple(rows), queue), using)
        fired += len(report.fired)
        # A row that is still pending without another attempt would be tried again and again.
        if left := set(rows.values()).difference(report.done):
            pending = Timeout.objects.using(using).pending().filter(pk__in=left)
            for timeout_id, attempts in pending.values_list("pk", "attempts"):
                if attempts <= attempts_of.get(timeout_id, 0):
                    stuck.add(timeout_id)
                attempts_of[timeout_id] = attempts
    return fired


@compiled
def _due(using: str, limit: int, labels: tuple[str, ...] | None, excluded: int) -> QuerySet[Timeout, Any]:
    rows = Timeout.objects.using(using).due().exclude(pk__in=params("id", excluded)).order_by("run_at", "id")
    rows = rows if labels is None else rows.of_labels(labels)
    return rows.values_list("policy", "queue", "object_id", "id")[:limit]
