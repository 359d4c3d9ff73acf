"""Each verb locks the business row first and the ledger row second, and several rows in the order of their slots.

Two transactions that lock in opposite orders wait for each other, and the database ends one of them with an error. The
order of the statements shows it on every database; `tests/e2e/races` shows that nothing deadlocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]

LEDGER = Timeout._meta.db_table


def pay(order: Order) -> None:
    with dq.before_deadline(order, "remind"):
        pass


@pytest.mark.parametrize(
    "verb",
    [
        lambda order: dq.schedule_timeout(order, "remind", minutes=5),
        lambda order: dq.cancel_timeout(order, "remind"),
        lambda order: dq.reschedule_timeout(order, "remind", minutes=5),
        lambda order: dq.extend_timeout(order, "remind", minutes=5),
        pay,
    ],
    ids=["schedule", "cancel", "reschedule", "extend", "before_deadline"],
)
def test_the_business_row_comes_before_the_ledger_row(verb: Callable[[Order], object]) -> None:
    order = Order.objects.create(status="new")
    dq.schedule_timeout(order, "remind", minutes=30)
    with CaptureQueriesContext(connection) as queries:
        verb(order)
    statements = " ".join(query["sql"] for query in queries if "id = -1" not in query["sql"])
    tables = re.findall(rf"(?:FROM|UPDATE|INTO) [`\"](testapp_order|{LEDGER})[`\"]", statements)
    assert tables.index("testapp_order") < tables.index(LEDGER)


@pytest.mark.parametrize(
    "verb",
    [
        lambda rows: dq.cancel_timeouts(rows),
        lambda rows: dq.reschedule_timeouts(rows, minutes=5),
        lambda rows: dq.extend_timeouts(rows, minutes=5),
    ],
    ids=["cancel", "reschedule", "extend"],
)
def test_rows_are_locked_in_the_order_of_their_slots(verb: Callable[..., object]) -> None:
    orders = [Order.objects.create(status="new") for _ in range(3)]
    dq.schedule_timeouts(orders, "remind", minutes=30)
    with CaptureQueriesContext(connection) as queries:
        verb(dq.pending_timeouts(Order, "remind").order_by("-pk"))
    locking = [query["sql"] for query in queries if re.search(r"ORDER BY [`\"]\w+[`\"].[`\"]slot[`\"]", query["sql"])]
    assert locking, "no statement orders by slot"


def test_rows_are_inserted_in_the_order_of_their_slots() -> None:
    orders = [Order.objects.create(status="new") for _ in range(20)]
    dq.schedule_timeouts(orders, "remind", minutes=30)
    slots = list(Timeout.objects.order_by("pk").values_list("slot", flat=True))
    assert slots == sorted(slots)


def test_a_save_inserts_the_rows_of_several_policies_in_the_order_of_their_slots(
    declare: Callable[..., dq.TimeoutPolicy[Any]],
) -> None:
    for number in range(8):
        declare(Order, name=f"automatic_{number}", after=timedelta(hours=1), since="created_at", when=Q(status="new"))
    Order.objects.create(status="new", created_at=timezone.now())
    slots = list(Timeout.objects.order_by("pk").values_list("slot", flat=True))
    assert len(slots) == 8
    assert slots == sorted(slots)


def test_extending_many_leaves_a_retry_waiting() -> None:
    """As extending one does: the handler failed, and its next attempt must not come early."""
    row = dq.schedule_timeout(Order.objects.create(status="new"), "remind", minutes=1)
    retry_at = row.due_at + timedelta(hours=5)
    Timeout.objects.update(run_at=retry_at, attempts=1)
    assert dq.extend_timeouts(dq.pending_timeouts(Order, "remind"), minutes=1) == 1
    row.refresh_from_db()
    assert (row.run_at, row.due_at) == (retry_at, retry_at - timedelta(hours=4, minutes=59))
