"""Each look-up of the scheduling side goes through its index, on every database: none may scan the ledger.

The plans of the sweep and the poll are held beside the worker, on far more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
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

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db]

ROWS = 3000


def analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {'TABLE ' * (connection.vendor == 'mysql')}{Timeout._meta.db_table}")


@pytest.fixture(scope="module")
def orders(django_db_setup: None, django_db_blocker: Any) -> Iterator[list[Order]]:
    """Many orders, each with one settled and one pending row, and statistics that the planner has seen."""
    with django_db_blocker.unblock():
        now, rows = timezone.now(), []
        Order.objects.bulk_create([Order(status="bulk") for _ in range(ROWS)])
        made = list(Order.objects.filter(status="bulk"))
        kind, label = ContentType.objects.get_for_model(Order).pk, dq.get_policy((Order, "remind")).label
        for order in made:
            due_at, key = now + timedelta(days=1), str(order.pk)
            common = {
                "policy": label, "content_type_id": kind, "object_id": key, "slot": slot_of(label, kind, key, ""),
                "created_at": now, "due_at": due_at, "run_at": due_at, "first_due_at": now,
            }  # fmt: skip
            settled = now - timedelta(days=order.pk % 60)
            fired = Timeout(**common, state="fired", cause="due", settled_at=settled, slot_taken=None)
            rows += [Timeout(**common), fired]
        Timeout.objects.bulk_create(rows, batch_size=500)
        analyze()
        yield made
        Timeout.objects.all().delete()
        Order.objects.filter(status="bulk")._raw_delete("default")
        analyze()


def long_ago() -> datetime:
    return timezone.now() - timedelta(days=59)


LOOK_UPS: dict[str, tuple[Callable[[Order], QuerySet[Any]], str]] = {
    "slot": (lambda order: subject_of(order, "remind").pending(), "delayq_one_pending_per_slot"),
    "rounds": (lambda order: subject_of(order, "remind").rounds(), "delayq_one_pending_per_slot"),
    "relation": (lambda order: order.timeouts.all(), "delayq_object"),
    "pending": (lambda order: dq.pending_timeouts(order).order_by("id"), "delayq_object"),
    "pending of some": (
        lambda order: dq.pending_timeouts([order, Order(pk=order.pk + 1)], "remind").order_by("id"), "delayq_object",
    ),
    "annotated": (
        lambda order: Order.objects.filter(pk=order.pk).annotate(due=dq.Deadline("remind")), "delayq_object",
    ),
    "joined": (lambda order: Order.objects.filter(pk=order.pk, timeouts__state="pending"), "delayq_object"),
    "excluded": (
        lambda order: Order.objects.filter(pk=order.pk).exclude(timeouts__state="dead"), "delayq_object",
    ),
    "to prune": (
        lambda order: Timeout.objects.filter(settled_at__lt=long_ago()).order_by("settled_at")[:99],
        "delayq_settled",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_look_up_uses_its_index(orders: list[Order], name: str) -> None:
    query, index = LOOK_UPS[name]
    plan = query(orders[ROWS // 2]).explain()
    if connection.vendor == "sqlite" and index == "delayq_one_pending_per_slot":
        index = "sqlite_autoindex_django_delayq_timeout"  # SQLite names the index of a constraint itself
    assert index in plan, plan
