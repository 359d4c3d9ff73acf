"""Fire everything that is due by the clock, in this thread, one after the other in due order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_delayq.firing import Work, run, settle_expired
from django_delayq.models import Timeout
from django_delayq.policies import registry

if TYPE_CHECKING:
    from django_delayq.models import TimeoutQuerySet


def fire_due(using: str = "default", limit: int | None = None) -> int:
    """Everything due has been fired, in due order; returns how many handlers ran to their end.

    What a firing makes due counts too, also a retry that follows at once. What cannot be fired now (its object is
    locked, its policy not declared) is looked at once. Inside `django_delayq.clock.set_to(moment)`, due means
    by that moment. Handlers that raise are recorded as a worker would: see `Timeout.errors`.

    Args:
        using: the database.
        limit: fire no more than this many.
    """
    settle_expired(using)
    fired = 0
    tried: dict[int, int] = {}
    while limit is None or fired < limit:
        stuck = [timeout_id for timeout_id, attempts in tried.items() if attempts < 0]
        due = Timeout.objects.using(using).due().exclude(pk__in=stuck).order_by("run_at", "id")
        work = _next(due, None if limit is None else limit - fired)
        if work is None:
            break
        fired += len(run(work, using).fired)
        _note_stuck(work, using, tried)
    return fired


def _next(due: TimeoutQuerySet, most: int | None) -> Work | None:
    """The first due timeout, and, if its policy takes batches, those that go with it."""
    first = due.only("policy", "object_id", "queue").first()
    if first is None:
        return None
    policy: Any = registry.get(first.policy)
    rows = [first]
    if policy is not None and policy.batch:
        size = policy.batch if most is None else min(policy.batch, most)
        by_object: dict[str, Timeout] = {}
        for row in due.of_labels(policy.labels).only("policy", "object_id", "queue")[:size]:
            by_object.setdefault(row.object_id, row)
        rows = list(by_object.values())
    return Work(first.policy, tuple(row.pk for row in rows), tuple(row.object_id for row in rows), first.queue)


def _note_stuck(work: Work, using: str, tried: dict[int, int]) -> None:
    """Leave alone from now on what still waits without another attempt behind it: it would never end."""
    waiting = Timeout.objects.using(using).pending().filter(pk__in=work.ids)
    for timeout_id, attempts in waiting.values_list("pk", "attempts"):
        tried[timeout_id] = attempts if attempts > tried.get(timeout_id, 0) else -1
