"""`when`, asked again on the locked row: in SQL's own logic, and through relations of every kind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models import BooleanField, Exists, F, Func, OuterRef, Q

import django_delayq as dq
from tests.integration.firing.conftest import due, fire, state
from tests.support.waiting import wait_until
from tests.testapp.models import Customer, Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
FIRED, UNMET = ("fired", "due"), ("skipped", "condition")


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (Q(note="x"), UNMET),
        (~Q(note="x"), FIRED),
        (Q(note__gt=""), UNMET),
        (Q(note=F("status")), UNMET),
        (Q(note__isnull=True), FIRED),
        (Q(), FIRED),
    ],
)
def test_null_is_not_true(order: Order, declare: Declare, when: Q, expected: tuple[str, str]) -> None:
    row = due(order, declare(Order, name="of_null", when=when))
    fire(row)
    assert state(row) == expected


@pytest.mark.parametrize("vip", [True, False, None])
def test_a_condition_over_a_nullable_relation_locks_and_decides(declare: Declare, vip: bool | None) -> None:
    customer = None if vip is None else Customer.objects.create(vip=vip)
    row = due(Order.objects.create(customer=customer), declare(Order, name="of_vip", when=Q(customer__vip=True)))
    fire(row)
    assert state(row) == (FIRED if vip else UNMET)


def test_an_outer_join_in_the_condition_is_no_trouble_for_the_lock(declare: Declare) -> None:
    policy = declare(Order, name="of_outer", when=Q(customer__vip=True) | Q(status="unpaid"))
    alone, paid = Order.objects.create(), Order.objects.create(status="paid")
    rows = [due(alone, policy), due(paid, policy)]
    fire(*rows)
    assert [state(row) for row in rows] == [FIRED, UNMET]


def test_a_condition_that_finds_a_row_several_times_fires_it_once(declare: Declare) -> None:
    ran: list[Any] = []
    policy = declare(Customer, lambda obj, timeout: ran.append(obj.pk), name="of_many", when=Q(order__status="unpaid"))
    many, none = Customer.objects.create(), Customer.objects.create()
    for _ in range(3):
        Order.objects.create(customer=many)
    rows = [due(many, policy), due(none, policy)]
    fire(*rows)
    assert [state(row) for row in rows] == [FIRED, UNMET]
    assert ran == [many.pk]


def test_a_batch_does_not_double_what_its_condition_finds_twice(declare: Declare) -> None:
    seen: list[list[int]] = []
    policy = declare(
        Customer,
        lambda queryset, timeouts: seen.append([obj.pk for obj in queryset]),
        name="of_many_in_batch",
        when=Q(order__status="unpaid"),
        batch=10,
    )
    customers = [Customer.objects.create() for _ in range(2)]
    for _ in range(3):
        for customer in customers:
            Order.objects.create(customer=customer)
    fire(*[due(customer, policy) for customer in customers])
    assert seen == [[customer.pk for customer in customers]]


def test_a_subquery_serves_as_condition(order: Order, declare: Declare) -> None:
    warned = Exists(Effect.objects.filter(what="warned", timeout_id=OuterRef("pk")))
    policy = declare(Order, name="of_exists", when=Q(warned))
    row = due(order, policy)
    Effect.objects.create(what="warned", object_id="", timeout_id=order.pk)
    other = due(Order.objects.create(), policy)
    fire(row, other)
    assert (state(row), state(other)) == (FIRED, UNMET)


@pytest.mark.parametrize("when", [Q(customer__name__in=[]), Q(pk__in=Order.objects.none())])
@pytest.mark.parametrize("batch", [None, 5])
def test_a_condition_on_other_rows_that_none_can_match_does_not_hold(
    order: Order, declare: Declare, when: Q, batch: int | None
) -> None:
    policy = declare(Order, name="of_none", when=when, batch=batch)
    rows = [due(order, policy), due(Order.objects.create(), policy)]
    fire(*rows)
    assert [state(row) for row in rows] == [UNMET, UNMET]


def test_members_of_a_group_are_checked_each_by_itself(orders: list[Order]) -> None:
    rows = [due(order, "cancel_unpaid") for order in orders]
    Order.objects.filter(pk__in=[orders[1].pk, orders[3].pk]).update(status="paid")
    fire(*rows)
    assert [state(row) for row in rows] == [FIRED, UNMET, FIRED, UNMET, FIRED]
    assert list(Order.objects.order_by("pk").values_list("status", flat=True)) == [
        "cancelled",
        "paid",
        "cancelled",
        "paid",
        "cancelled",
    ]


def is_asleep() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'")
        return cursor.fetchone() is not None


class SleepsOnPostgreSQL(Func):
    """True, two seconds after it was asked."""

    template = "(SELECT 1 FROM pg_sleep(2)) = 1"
    output_field = BooleanField()


@pytest.mark.dialect
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
    assert state(row) == ("skipped", "condition")
    assert not Effect.objects.exists()
