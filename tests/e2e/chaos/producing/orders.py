"""Orders are placed, postponed, paid, reopened and removed; their automatic timeout follows."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

from django_delayq import DeadlinePassed, before_deadline, sync_timeouts
from tests.e2e.chaos.audit import AUTOMATIC_SECONDS
from tests.e2e.chaos.producing.operation import Operation, Undo, claim, half, in_, operation
from tests.testapp.models import Order

POLICY = "cancel_unpaid"


def _new(due_at: datetime, note: str) -> Order:
    return Order(created_at=due_at - timedelta(seconds=AUTOMATIC_SECONDS), note=note)


def _note(operation: Operation, *orders: Order) -> None:
    operation.orders = [order.pk for order in orders]
    operation.note(*(claim("place", order.pk, POLICY, since=order.created_at, was=None) for order in orders))


@operation(12)
def place(operation: Operation) -> None:
    orders = [_new(operation.a_deadline(), operation.id) for _ in range(operation.random.randint(1, 6))]
    for order in orders:
        order.save()
    _note(operation, *orders)


@operation(2)
def place_after_a_savepoint(operation: Operation) -> None:
    """Roll the first order back with its savepoint, and keep the second one."""
    half(_new(operation.a_deadline(), f"half-{operation.id}").save)
    order = _new(operation.a_deadline(), operation.id)
    order.save()
    _note(operation, order)


@operation(0.4)
def place_and_commit_late(operation: Operation) -> None:
    """Commit an order that is already overdue."""
    order = _new(in_(0.1), operation.id)
    order.save()
    time.sleep(operation.random.uniform(0.2, 0.8))
    _note(operation, order)


@operation(1, is_atomic=False)
def place_outside_a_transaction(operation: Operation) -> None:
    """Save and arm in two commits. After a crash between them, the sync arms it."""
    _new(operation.a_deadline() + timedelta(seconds=4), f"out-{operation.id}").save()


@operation(0.5, is_atomic=False)
def place_unseen(operation: Operation) -> None:
    """Create orders without signals, which the sync finds."""
    Order.objects.bulk_create(_new(in_(operation.random.uniform(8, 10)), f"out-{operation.id}") for _ in range(3))


@operation(2)
def place_in_bulk(operation: Operation) -> None:
    orders = Order.objects.bulk_create(_new(operation.a_deadline(), operation.id) for _ in range(40))
    sync_timeouts(Order.objects.filter(pk__in=[order.pk for order in orders]))
    _note(operation, *orders)


def _begin_again(operation: Operation, status: str) -> None:
    order = operation.a_locked_order(status)
    order.status, order.created_at = "unpaid", _new(operation.a_deadline(), "").created_at
    order.save(update_fields=["status", "created_at"])
    operation.note(claim("place", order.pk, POLICY, since=order.created_at, was=status))


@operation(3)
def postpone(operation: Operation) -> None:
    """Move the time that the deadline counts from, and so the deadline."""
    _begin_again(operation, "unpaid")


@operation(2)
def reopen(operation: Operation) -> None:
    _begin_again(operation, "cancelled")


@operation(1)
def remove(operation: Operation) -> None:
    if not operation.hands.own:
        raise Undo
    order = Order.objects.select_for_update().get(pk=operation.hands.own.popleft())
    pk = order.pk
    order.delete()
    operation.note(claim("remove", pk, POLICY))


def _pay(operation: Operation, order: Order, verb: str = "pay", **what: Any) -> None:
    was = order.status
    if was == "unpaid":
        order.status = "paid"
        order.save()
    operation.note(claim(verb, order.pk, POLICY, answer="paid" if was == "unpaid" else f"was {was}", **what))


@operation(5, is_atomic=False)
def pay(operation: Operation) -> None:
    """As a view does; too late is an answer, and undoes nothing, as nothing was done."""
    order = operation.an_order()
    with before_deadline(order, POLICY):
        _pay(operation, order)


@operation(3)
def pay_among_other_things(operation: Operation) -> None:
    order = operation.an_order()
    try:
        with before_deadline(order, POLICY):
            _pay(operation, order)
    except DeadlinePassed:
        operation.note(claim("pay", order.pk, POLICY, answer="too late"))


@operation(3)
def pay_in_time(operation: Operation) -> None:
    """As a view for which the deadline itself decides. The order stays locked when the guard refuses."""
    order = Order.objects.select_for_update().get(pk=operation.an_order().pk)
    asked = in_(0)
    try:
        with before_deadline(order, POLICY, strict=True):
            _pay(operation, order, "pay_in_time", asked=asked)
    except DeadlinePassed:
        operation.note(claim("pay_in_time", order.pk, POLICY, answer="too late", asked=asked, heard=in_(0)))


@operation(3)
def pay_conditionally(operation: Operation) -> None:
    """Pay by a conditional UPDATE without the guard, with or without a sync."""
    order = operation.an_order()
    if not Order.objects.filter(pk=order.pk, status="unpaid").update(status="paid"):
        raise Undo
    tells = operation.random.random() < 0.5
    if tells:
        sync_timeouts(order)
    operation.note(claim("pay", order.pk, POLICY, answer="paid" if tells else "paid silently"))
