"""A backlog of one policy, due before anything else, and real workers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from django_delayq import clock, get_policy
from django_delayq.ledger import writing
from django_delayq.ledger.outbox import due_ms_of
from django_delayq.ledger.subjects import subject_at
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine, get_worker_engine
from tests.support.processes import start_worker as start_worker  # noqa: PLC0414 - a fixture, for the tests here
from tests.testapp.models import Order, Parcel


@pytest.fixture(params=["redis", "ledger"])
def source(request: pytest.FixtureRequest, settings: Any) -> Any:
    """Return the variables of a worker with Redis, and of one without."""
    if request.param == "redis":
        request.getfixturevalue("redis_client")
        yield {}
    else:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
        yield {"WITHOUT_REDIS": "1"}
    forget_engine()


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
    slots = [row.slot for row in rows]
    ids = list(Timeout.objects.filter(policy=declared.label, slot__in=slots[:1000]).values_list("pk", flat=True))
    if len(slots) > 1000:
        ids = list(Timeout.objects.filter(policy=declared.label).values_list("pk", flat=True))
    engine = get_worker_engine("default")
    if engine is not None:
        engine.queue(queue, 0).ensure(declared.label, ((id, due_ms_of(at)) for id in ids))
        engine.close()
    return ids


def fired(ids: list[int]) -> int:
    return Timeout.objects.filter(pk__in=ids, state="fired").count()


def waiting(policy: str) -> int:
    return Timeout.objects.pending().filter(policy=f"testapp.order.{policy}").count()
