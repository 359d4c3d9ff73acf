"""What each call sends to the database, one statement where nothing is in its way, and in which order it locks."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.sql.dialects import dialect_of
from tests.e2e.races.sessions import Session, needs_row_locks
from tests.support.seen import sql_of
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

at_once = dialect_of(connection).locks_and_writes_at_once


@pytest.fixture
def order() -> Order:
    """An order of yesterday: saving arms a deadline that passed `CATCH_UP` ago at most, so a fixed date expires."""
    yesterday = timezone.now() - timedelta(days=1)
    return Order.objects.create(status="new", created_at=yesterday.replace(microsecond=0))


def statements(call: Callable[[], object]) -> list[str]:
    """Return the first words of the statements of `call`, without those that begin and end transactions."""
    words = [sql.split()[0].rstrip(";") for sql in sql_of(call)]
    return [word for word in words if word not in ("SAVEPOINT", "RELEASE", "BEGIN", "COMMIT")]


def transactions(call: Callable[[], object]) -> int:
    return sum(sql.startswith("BEGIN") for sql in sql_of(call))


def test_scheduling_is_one_statement_without_a_transaction_of_its_own(order: Order) -> None:
    def schedule() -> None:
        Timeout.objects.all()._raw_delete("default")
        dq.schedule_timeout(order, "remind", minutes=5)

    expected = ["DELETE", *(["WITH"] if at_once else ["SELECT", "INSERT"])]
    assert statements(schedule) == expected
    assert transactions(schedule) == (0 if at_once else 1)
    with transaction.atomic():
        assert statements(schedule) == expected


@pytest.mark.parametrize(("policy", "steps"), [("remind", []), ("cancel_unpaid", ["SELECT"])])
def test_cancelling_is_one_statement_also_for_the_round_of_a_column(
    order: Order, policy: str, steps: list[str]
) -> None:
    order.status = "unpaid"
    order.save()
    dq.schedule_timeout(order, "remind", minutes=5)
    sent = statements(lambda: dq.cancel_timeout(order, policy, reason="paid"))
    assert sent == (["WITH"] if at_once else ["SELECT", "SELECT", "SELECT", "UPDATE", *steps])
    row = Timeout.objects.exclude(state="pending").get()
    assert (row.state, row.cause, row.reason, row.slot_taken) == ("cancelled", "hand", "paid", None)


@pytest.mark.parametrize("strict", [False, True])
def test_the_guard_locks_the_object_and_cancels_in_two_statements(order: Order, strict: bool) -> None:
    """Where one statement cannot cancel and compare, the strict guard reads the clock, if the database has one."""
    dq.schedule_timeout(order, "remind", minutes=5)

    def pay() -> None:
        with dq.before_deadline(order, "remind", strict=strict) as timeout:
            assert timeout is not None and timeout.state == "cancelled"

    in_steps = ["SELECT"] * (4 if strict and dialect_of(connection).server_time else 3)
    assert statements(pay) == (["SELECT", "UPDATE"] if at_once else [*in_steps, "UPDATE"])


@needs_row_locks
@pytest.mark.parametrize("verb", ["schedule", "replace", "cancel", "guard"])
def test_a_verb_that_waits_for_the_object_has_not_locked_its_row(verb: str, order: Order) -> None:
    """The order of locks inside one statement is the planner's; here the row must stay free."""
    if verb != "schedule":
        dq.schedule_timeout(order, "remind", minutes=5)
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=order.pk)
        session = Session(lambda: SINGLE["schedule" if verb == "replace" else verb](order))
        session.wait_until_it_waits()
        assert len(Timeout.objects.select_for_update(skip_locked=True)) == (verb != "schedule")
        Order.objects.filter(pk=order.pk).update(note="changed meanwhile")
    session.end()
    assert Timeout.objects.get().state == ("pending" if verb in ("schedule", "replace") else "cancelled")


# Each verb locks the business row first and the ledger row second, and several rows in the order of their slots. Two
# transactions that lock in opposite orders wait for each other, and the database ends one of them with an error. The
# order of the statements shows it on every database; `tests/e2e/races` shows that nothing deadlocks.
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
