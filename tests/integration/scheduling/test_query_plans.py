"""Each look-up of the scheduling side goes through its index, on every database: none may scan the ledger.

The plans of the sweep and the poll are held beside the worker, on far more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import QuerySet
from django.utils import timezone

import django_delayq as dq
from django_delayq.ledger.subjects import subject_of
from django_delayq.models import Timeout, slot_of
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect]

ROWS = 3000


@pytest.fixture(scope="module")
def orders(django_db_setup: None, django_db_blocker: Any) -> Iterator[list[Order]]:
    """Many orders, each with one settled and one pending row, and statistics that the planner has seen."""
    with django_db_blocker.unblock():
        now = timezone.now()
        made = Order.objects.bulk_create([Order(status="bulk") for _ in range(ROWS)])
        made = list(Order.objects.filter(status="bulk"))
        kind = ContentType.objects.get_for_model(Order).pk
        label = dq.get_policy((Order, "remind")).label
        rows = []
        for order in made:
            common = {
                "policy": label, "content_type_id": kind, "object_id": str(order.pk), "created_at": now,
                "due_at": now + timedelta(days=1), "run_at": now + timedelta(days=1),
                "first_due_at": now, "slot": slot_of(label, kind, str(order.pk), ""),
            }  # fmt: skip
            rows.append(Timeout(**common))
            settled = now - timedelta(days=order.pk % 60)
            rows.append(Timeout(**common, state="fired", cause="due", settled_at=settled, slot_taken=None))
        Timeout.objects.bulk_create(rows, batch_size=500)
        table = connection.ops.quote_name(Timeout._meta.db_table)
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE TABLE {table}" if connection.vendor == "mysql" else f"ANALYZE {table}")
        yield made
        Timeout.objects.all().delete()
        Order.objects.filter(status="bulk")._raw_delete("default")
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE TABLE {table}" if connection.vendor == "mysql" else f"ANALYZE {table}")


def slots(order: Order) -> QuerySet[Any]:
    return subject_of(order, "remind").pending()


def rounds(order: Order) -> QuerySet[Any]:
    return subject_of(order, "remind").rounds()


def of_object(order: Order) -> QuerySet[Any]:
    rows: QuerySet[Any] = order.timeouts.all()
    return rows


def pending_of_object(order: Order) -> QuerySet[Any]:
    return dq.pending_timeouts(order).order_by("id")


def pending_of_some(order: Order) -> QuerySet[Any]:
    return dq.pending_timeouts([order, Order(pk=order.pk + 1)], "remind").order_by("id")


def annotated(order: Order) -> QuerySet[Any]:
    return Order.objects.filter(pk=order.pk).annotate(due=dq.Deadline("remind"))


def joined(order: Order) -> QuerySet[Any]:
    return Order.objects.filter(pk=order.pk, timeouts__state="pending")


def excluded(order: Order) -> QuerySet[Any]:
    return Order.objects.filter(pk=order.pk).exclude(timeouts__state="dead")


def old(order: Order) -> QuerySet[Any]:
    return Timeout.objects.filter(settled_at__lt=timezone.now() - timedelta(days=59)).order_by("settled_at")[:100]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("query", "index"),
    [
        (slots, "delayq_one_pending_per_slot"),
        (rounds, "delayq_one_pending_per_slot"),
        (of_object, "delayq_object"),
        (pending_of_object, "delayq_object"),
        (pending_of_some, "delayq_object"),
        (annotated, "delayq_object"),
        (joined, "delayq_object"),
        (excluded, "delayq_object"),
        (old, "delayq_settled"),
    ],
)
def test_a_look_up_uses_its_index(orders: list[Order], query: Callable[[Order], QuerySet[Any]], index: str) -> None:
    plan = query(orders[ROWS // 2]).explain()
    if connection.vendor == "sqlite" and index == "delayq_one_pending_per_slot":
        index = "sqlite_autoindex_django_delayq_timeout"  # SQLite names the index of a constraint itself
    assert index in plan, plan
