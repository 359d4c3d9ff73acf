"""One timeout is one transaction: those after it see what was done, and its condition is asked on the locked row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models import BooleanField, Exists, Func, OuterRef, Q

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import Timeout
from tests.integration.firing.conftest import FIRED, UNMET, Declare, due, execute, fire, state
from tests.support.waiting import wait_until
from tests.testapp.models import Customer, Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def test_one_that_raises_repeats_nothing_of_the_others(orders: list[Order], declare: Declare) -> None:
    sent: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        sent.append(obj.pk)
        if obj.pk == orders[2].pk:
            raise ValueError

    policy = declare(Order, handler, name="sends", retry=dq.Retry([60]))
    for _ in range(3):  # also after several that were quick
        fire(*[due(Order.objects.create(), policy) for _ in range(10)])
    sent.clear()
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert sent == [order.pk for order in orders]
    assert [state(row)[0] for row in rows] == ["fired", "fired", "pending", "fired", "fired"]


def others(obj: Order) -> Any:
    return Order.objects.exclude(pk=obj.pk)


def timeouts_of_others(obj: Order) -> Any:
    return dq.pending_timeouts(others(obj), "siblings")


def save_all_others(obj: Order) -> None:
    for other in others(obj):
        other.status = "paid"
        other.save()


WAYS: dict[str, Callable[[Order], object]] = {
    "saves": save_all_others,
    "an update": lambda obj: others(obj).update(status="paid"),
    "a deletion": lambda obj: others(obj).delete(),
    "an update in SQL": lambda obj: execute(f"UPDATE testapp_order SET status = 'paid' WHERE id <> {obj.pk}"),
    "cancel_timeouts": lambda obj: dq.cancel_timeouts(timeouts_of_others(obj)),
    "reschedule_timeouts": lambda obj: dq.reschedule_timeouts(timeouts_of_others(obj), hours=2),
    "schedule_timeouts": lambda obj: dq.schedule_timeouts(others(obj), "siblings", hours=2),
    "operations.cancel": lambda obj: operations.cancel(timeouts_of_others(obj), by="handler"),
    "a related row": lambda obj: Customer.objects.filter(pk=obj.customer_id or 0).update(vip=True),
    "its own row": lambda obj: setattr(obj, "note", "told"),
    "any row": lambda obj: Effect.objects.create(what="told", object_id=obj.pk),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_handler_does_to_other_objects_and_their_timeouts_reaches_them(declare: Declare, way: str) -> None:
    called: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        called.append(obj.pk)
        WAYS[way](obj)
        obj.status = "cancelled"
        obj.save()

    told = Order.objects.filter(customer=OuterRef("customer"), note="told")
    when = Q(status="unpaid", customer__vip=False) & ~Exists(told) & ~Exists(Effect.objects.all())
    policy = declare(Order, handler, name="siblings", when=when)
    customer = Customer.objects.create()
    orders = [Order.objects.create(customer=customer) for _ in range(3)]
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert ([state(row) == FIRED for row in rows], called) == ([True, False, False], [orders[0].pk])
    assert Order.objects.filter(status="cancelled").count() == 1, "nothing is overwritten"


def test_a_handler_sees_the_timeouts_of_siblings_as_they_are(declare: Declare) -> None:
    left: list[int] = []
    policy = declare(Order, lambda obj, timeout: left.append(timeouts_of_others(obj).count()), name="siblings")
    fire(*[due(Order.objects.create(), policy) for _ in range(3)])
    assert left == [2, 1, 0]


# The condition. The table of all kinds of conditions is in the tests of the matrix


@pytest.mark.parametrize("when", [Q(customer__name__in=[]), Q(pk__in=Order.objects.none())])
@pytest.mark.parametrize("batch", [None, 5])
def test_a_condition_on_other_rows_that_none_can_match_does_not_hold(
    declare: Declare, when: Q, batch: int | None
) -> None:
    policy = declare(Order, lambda *_: pytest.fail("called"), name="of_none", when=when, batch=batch)
    rows = [due(Order.objects.create(), policy) for _ in range(2)]
    fire(*rows)
    assert [state(row) for row in rows] == [UNMET, UNMET]


class SleepsOnPostgreSQL(Func):
    """True, two seconds after it was asked."""

    template = "(SELECT 1 FROM pg_sleep(2)) = 1"
    output_field = BooleanField()


def is_asleep() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'")
        return cursor.fetchone() is not None


@pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL, which evaluates the condition twice")
def test_a_condition_that_is_read_with_the_lock_is_that_of_the_locked_row(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="read_with_lock", when=Q(status="unpaid") & Q(SleepsOnPostgreSQL()))
    row = due(order, policy)

    def pay() -> None:
        try:
            wait_until(is_asleep)  # the firing has seen "unpaid", and has yet to lock the row
            Order.objects.filter(pk=order.pk).update(status="paid")
        finally:
            connections.close_all()

    payer = threading.Thread(target=pay)
    payer.start()
    fire(row)
    payer.join(20)
    assert state(row) == UNMET
