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
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.support.seen import sql_of
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]

LEDGER = Timeout._meta.db_table
SLOT_ORDER = r"ORDER BY [`\"]\w+[`\"].[`\"]slot[`\"]"


def pay(order: Order) -> None:
    with dq.before_deadline(order, "remind"):
        pass


SINGLE: dict[str, Callable[[Order], object]] = {
    "schedule": lambda order: dq.schedule_timeout(order, "remind", minutes=5),
    "cancel": lambda order: dq.cancel_timeout(order, "remind"),
    "reschedule": lambda order: dq.reschedule_timeout(order, "remind", minutes=5),
    "extend": lambda order: dq.extend_timeout(order, "remind", minutes=5),
    "guard": pay,
}
BULK: dict[str, Callable[[Any], object]] = {
    "cancel": dq.cancel_timeouts,
    "reschedule": lambda rows: dq.reschedule_timeouts(rows, minutes=5),
    "extend": lambda rows: dq.extend_timeouts(rows, minutes=5),
}


@pytest.mark.parametrize("verb", SINGLE)
def test_the_business_row_comes_before_the_ledger_row(order: Order, verb: str) -> None:
    dq.schedule_timeout(order, "remind", minutes=30)
    sent = " ".join(sql for sql in sql_of(lambda: SINGLE[verb](order)) if "id = -1" not in sql)
    tables = re.findall(rf"(?:FROM|UPDATE|INTO) [`\"](testapp_order|{LEDGER})[`\"]", sent)
    assert tables.index("testapp_order") < tables.index(LEDGER)


@pytest.mark.parametrize("verb", BULK)
def test_rows_are_locked_in_the_order_of_their_slots(verb: str) -> None:
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(3)], "remind", minutes=30)
    sent = sql_of(lambda: BULK[verb](dq.pending_timeouts(Order, "remind").order_by("-pk")))
    assert [sql for sql in sent if re.search(SLOT_ORDER, sql)], "no statement orders by slot"


@pytest.mark.parametrize("by_save", [False, True])
def test_rows_are_inserted_in_the_order_of_their_slots(declare: Callable[..., Any], by_save: bool) -> None:
    """The rows of many objects, and those of many policies of one object."""
    if by_save:
        for number in range(8):
            declare(Order, name=f"auto_{number}", after=timedelta(hours=1), since="created_at", when=Q(status="new"))
        Order.objects.create(status="new", created_at=timezone.now())
    else:
        dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(20)], "remind", minutes=30)
    slots = list(Timeout.objects.order_by("pk").values_list("slot", flat=True))
    assert len(slots) == (8 if by_save else 20)
    assert slots == sorted(slots)


def test_extending_many_leaves_a_retry_waiting(order: Order) -> None:
    """As extending one does: the handler failed, and its next attempt must not come early."""
    row = dq.schedule_timeout(order, "remind", minutes=1)
    retry_at = row.due_at + timedelta(hours=5)
    Timeout.objects.update(run_at=retry_at, attempts=1)
    assert dq.extend_timeouts(dq.pending_timeouts(Order, "remind"), minutes=1) == 1
    row.refresh_from_db()
    assert (row.run_at, row.due_at) == (retry_at, retry_at - timedelta(hours=4, minutes=59))
