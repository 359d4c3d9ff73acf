"""One timeout is one transaction: those after it see what its handler, or a trigger, has done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.db.models import Exists, OuterRef, Q

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, state
from tests.testapp.models import Customer, Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
FIRED = ("fired", "due")

TRIGGERS = {
    "sqlite": ["CREATE TRIGGER {name} AFTER INSERT ON testapp_effect BEGIN {act}; END"],
    "mysql": ["CREATE TRIGGER {name} AFTER INSERT ON testapp_effect FOR EACH ROW {act}"],
    "postgresql": [
        "CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {act}; RETURN NULL; END $$",
        "CREATE TRIGGER {name} AFTER INSERT ON testapp_effect EXECUTE FUNCTION {name}()",
    ],
}
"""On another table: MySQL and MariaDB refuse a trigger that writes the table of its own statement."""


@pytest.fixture
def paid_by_trigger(orders: list[Order]) -> Iterator[None]:
    """When a handler inserts an effect, a trigger of the database marks the second order as paid."""
    act = f"UPDATE testapp_order SET status = 'paid' WHERE id = {orders[1].pk} AND status = 'unpaid'"
    for statement in TRIGGERS[connection.vendor]:
        raw(statement.format(name="pay_the_second", act=act))
    try:
        yield
    finally:
        on = " ON testapp_effect" if connection.vendor == "postgresql" else ""
        raw(f"DROP TRIGGER pay_the_second{on}")
        if on:
            raw("DROP FUNCTION pay_the_second()")


@pytest.mark.usefixtures("paid_by_trigger")
def test_an_object_that_a_trigger_has_changed_is_not_overwritten(orders: list[Order], declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk != orders[2].pk:
            Effect.objects.create(what="cancelled", object_id=obj.pk)
            obj.status = "cancelled"
            obj.save()

    policy = declare(Order, handler, name="triggered", when=Q(status="unpaid"))
    fire(due(orders[2], policy))  # a quick handler that did not raise changes nothing for those after it
    rows = [due(order, policy) for order in orders[:2]]
    fire(*rows)
    assert [state(row) for row in rows] == [FIRED, ("skipped", "condition")]
    assert list(Order.objects.order_by("pk").values_list("status", flat=True)[:2]) == ["cancelled", "paid"]


def test_one_that_raises_repeats_nothing_of_the_others(orders: list[Order], declare: Declare) -> None:
    sent: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        sent.append(obj.pk)
        if obj.pk == orders[2].pk:
            raise ValueError

    policy = declare(Order, handler, name="sends", retry=dq.Retry([60]))
    rows = [due(order, policy) for order in orders]
    for _ in range(3):  # also after several that were quick
        fire(*[due(Order.objects.create(), policy) for _ in range(10)])
    sent.clear()
    fire(*rows)
    assert sent == [order.pk for order in orders]
    assert [state(row)[0] for row in rows] == ["fired", "fired", "pending", "fired", "fired"]


def raw(sql: str, params: list[Any] | None = None) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)


WIDE: list[Callable[[Order], object]] = [
    lambda obj: Order.objects.exclude(pk=obj.pk).update(status="paid"),
    lambda obj: Order.objects.filter(status="unpaid").exclude(pk=obj.pk).update(status="paid"),
    lambda obj: Order.objects.filter(Q(pk=obj.pk + 1) | Q(pk=obj.pk)).update(status="paid"),
    lambda obj: Order.objects.filter(pk=obj.pk + 1).update(status="paid"),
    lambda obj: Order.objects.filter(pk__in=[obj.pk, obj.pk + 1]).update(status="paid"),
    lambda obj: save_all_others(obj),
    lambda obj: Order.objects.bulk_update([Order(pk=obj.pk + 1, status="paid")], ["status"]),
    lambda obj: raw("UPDATE testapp_order SET status = 'paid' WHERE id <> %s", [obj.pk]),
    lambda obj: raw(f"update testapp_order set status = 'paid' where id = {obj.pk + 1}"),
    lambda obj: Order.objects.exclude(pk=obj.pk).delete(),
]


def save_all_others(obj: Order) -> None:
    for other in Order.objects.exclude(pk=obj.pk):
        other.status = "paid"
        other.save()


@pytest.mark.parametrize("write", WIDE)
def test_an_object_that_another_handler_has_written_is_not_overwritten(
    declare: Declare, write: Callable[[Order], object]
) -> None:
    orders = [Order.objects.create(status="unpaid") for _ in range(2)]

    def handler(obj: Order, timeout: Timeout) -> None:
        write(obj)
        obj.status = "cancelled"
        obj.save()

    policy = declare(Order, handler, name="wide", when=Q(status="unpaid"))
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert state(rows[0]) == FIRED
    assert state(rows[1])[0] in {"skipped", "cancelled"}
    assert not Order.objects.filter(pk=orders[1].pk).exclude(status="paid").exists()


def of_customer(obj: Order, name: str) -> Any:
    return dq.pending_timeouts(Order.objects.filter(customer=obj.customer_id), name)


AMONG_SIBLINGS: dict[str, Callable[[Order], object]] = {
    "cancel_timeouts": lambda obj: dq.cancel_timeouts(of_customer(obj, "siblings")),
    "reschedule_timeouts": lambda obj: dq.reschedule_timeouts(of_customer(obj, "siblings"), hours=2),
    "extend_timeouts": lambda obj: dq.extend_timeouts(of_customer(obj, "siblings"), hours=2),
    "schedule_timeouts": lambda obj: dq.schedule_timeouts(
        Order.objects.filter(customer=obj.customer_id).exclude(pk=obj.pk), "siblings", hours=2
    ),
    "operations.cancel": lambda obj: operations.cancel(
        Timeout.objects.filter(policy="testapp.order.siblings", state="pending"), by="handler"
    ),
    "raw SQL": lambda obj: raw(
        "UPDATE django_delayq_timeout SET state = 'cancelled', cause = 'hand', settled_at = created_at, "
        "slot_taken = NULL WHERE state = 'pending' AND object_id <> %s",
        [str(obj.pk)],
    ),
    "the condition on a related row": lambda obj: Customer.objects.filter(pk=obj.customer_id or 0).update(vip=True),
    "the condition on other orders": lambda obj: Order.objects.filter(pk=obj.pk).update(note="told"),
}


@pytest.mark.parametrize("act", AMONG_SIBLINGS.values(), ids=AMONG_SIBLINGS)
def test_what_a_handler_does_to_the_timeouts_of_siblings_reaches_them(
    declare: Declare, act: Callable[[Order], object]
) -> None:
    called: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        called.append(obj.pk)
        act(obj)

    told = Order.objects.filter(customer=OuterRef("customer"), note="told")
    policy = declare(Order, handler, name="siblings", when=Q(customer__vip=False) & ~Exists(told))
    customer = Customer.objects.create()
    orders = [Order.objects.create(customer=customer) for _ in range(3)]
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows].count("fired") == 1
    assert called == [orders[0].pk]


@pytest.mark.parametrize(
    "of_any",
    [
        lambda: Effect.objects.all(),
        lambda: Customer.objects.filter(name="x").values("pk").union(Effect.objects.filter(what="told").values("pk")),
    ],
    ids=["all rows", "union"],
)
def test_a_handler_that_makes_the_condition_of_siblings_false_is_the_only_one_that_runs(
    declare: Declare, of_any: Callable[[], Any]
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="told", object_id=obj.pk)

    policy = declare(Order, handler, name="siblings", when=Q(~Exists(of_any())))
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    fire(*rows)
    assert [state(row) for row in rows] == [("fired", "due"), *[("skipped", "condition")] * 2]


def test_a_handler_sees_the_timeouts_of_siblings_as_they_are(declare: Declare) -> None:
    left: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        left.append(of_customer(obj, "last").count())

    policy = declare(Order, handler, name="last")
    customer = Customer.objects.create()
    fire(*[due(Order.objects.create(customer=customer), policy) for _ in range(3)])
    assert left == [2, 1, 0]
