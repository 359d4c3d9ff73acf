"""A backlog of one policy, due before anything else, and what came of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django_delayq import clock, get_policy
from django_delayq.ledger import writing
from django_delayq.ledger.outbox import due_ms_of
from django_delayq.ledger.subjects import subject_at
from django_delayq.models import Timeout
from django_delayq.redis_clients import get_worker_engine
from tests.testapp.models import Order, Parcel


def crowd(policy: str, count: int) -> None:
    """So many orders, each with a timeout of `policy` that was due an hour ago; Redis, if there is one, knows all."""
    at = clock.now() - timedelta(hours=1)
    _insert(Order, policy, [Order(status="new") for _ in range(count)], at)


def latecomers(count: int, queue: str = "default") -> list[int]:
    """Create timeouts of another policy that are due now; return their ids."""
    return _insert(Parcel, "chase", [Parcel() for _ in range(count)], clock.now(), queue)


def _insert(model: Any, policy: str, objects: list[Any], at: datetime, queue: str = "default") -> list[int]:
    declared: Any = get_policy((model, policy))
    model.objects.bulk_create(objects, batch_size=1000)
    rows = [writing.new_row(subject_at(declared, obj.pk, "", "default"), at, None) for obj in objects]
    for row in rows:
        row.queue = queue
    Timeout.objects.bulk_create(rows, batch_size=1000)
    slots = {row.slot for row in rows}
    found = Timeout.objects.filter(policy=declared.label).values_list("pk", "slot")
    ids = [pk for pk, slot in found if slot in slots]
    engine = get_worker_engine("default")
    if engine is not None:
        engine.queue(queue, 0).ensure(declared.label, ((id, due_ms_of(at)) for id in ids))
        engine.close()
    return ids


def fired(ids: list[int]) -> int:
    return Timeout.objects.filter(pk__in=ids, state="fired").count()


def waiting(policy: str) -> int:
    return Timeout.objects.pending().filter(policy=f"testapp.order.{policy}").count()
