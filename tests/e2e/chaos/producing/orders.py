"""Orders are placed, postponed, paid, reopened and removed; their automatic timeout follows."""

from __future__ import annotations

import time
from typing import Any

from django.db import transaction

from django_delayq import DeadlinePassed, before_deadline, sync_timeouts
from tests.e2e.chaos.producing.operation import (
    Operation,
    Undo,
    atomically,
    check_savepoint,
    claim,
    counted_from,
    in_,
    locked,
)
from tests.testapp.models import Order

POLICY = "cancel_unpaid"


def _new(operation: Operation, seconds: float, note: str = "") -> Order:
    return Order(created_at=counted_from(in_(seconds)), note=note or operation.id)


def _armed(order: Order) -> dict[str, object]:
    assert order.created_at is not None
    return claim("place", order.pk, POLICY, since=order.created_at)


@atomically
def place(operation: Operation) -> None:
    orders = [_new(operation, operation.hands.seconds()) for _ in range(operation.random.randint(1, 6))]
    for order in orders:
        order.save()
    operation.orders = [order.pk for order in orders]
    operation.note(*map(_armed, orders))


@atomically
def place_and_change_ones_mind(operation: Operation) -> None:
    _new(operation, operation.hands.seconds()).save()
    raise Undo


@atomically
def place_after_a_savepoint(operation: Operation) -> None:
    """Roll the first order back with its savepoint, and keep the second one."""
    try:
        with transaction.atomic():
            _new(operation, operation.hands.seconds(), f"half-{operation.id}").save()
            raise Undo
    except Undo:
        check_savepoint()
        order = _new(operation, operation.hands.seconds())
    order.save()
    operation.orders = [order.pk]
    operation.note(_armed(order))


@atomically
def place_and_commit_late(operation: Operation) -> None:
    """Commit an order that is already overdue."""
    order = _new(operation, 0.1)
    order.save()
    time.sleep(operation.random.uniform(0.2, 0.8))
    operation.orders = [order.pk]
    operation.note(_armed(order))


def place_outside_a_transaction(operation: Operation) -> None:
    """Save and arm in two commits. After a crash between them, the sync arms it."""
    _new(operation, 4 + operation.hands.seconds(), f"out-{operation.id}").save()


def place_unseen(operation: Operation) -> None:
    """Create orders without signals, which the sync finds."""
    Order.objects.bulk_create(_new(operation, operation.random.uniform(8, 10), f"out-{operation.id}") for _ in range(3))


@atomically
def place_in_bulk(operation: Operation) -> None:
    orders = Order.objects.bulk_create(_new(operation, operation.hands.seconds()) for _ in range(40))
    sync_timeouts(Order.objects.filter(pk__in=[order.pk for order in orders]))
    operation.orders = [order.pk for order in orders]
    operation.note(*map(_armed, orders))


@atomically
def postpone(operation: Operation) -> None:
    """Move the time that the deadline counts from, and so the deadline."""
    order = locked(operation.hands.an_order())
    if order.status != "unpaid":
        raise Undo
    order.created_at = counted_from(in_(operation.hands.seconds()))
    order.save(update_fields=["created_at"])
    operation.note(claim("count_anew", order.pk, POLICY, since=order.created_at))


@atomically
def reopen(operation: Operation) -> None:
    order = locked(operation.hands.an_order())
    if order.status != "cancelled":
        raise Undo
    order.status, order.created_at = "unpaid", counted_from(in_(operation.hands.seconds()))
    order.save()
    operation.note(claim("reopen", order.pk, POLICY, since=order.created_at))


@atomically
def remove(operation: Operation) -> None:
    if not operation.hands.own:
        raise Undo
    pk = operation.hands.own.popleft()
    locked(Order(pk=pk)).delete()
    operation.note(claim("remove", pk, POLICY))


def pay(operation: Operation) -> None:
    """As a view does; too late is an answer, and undoes nothing, as nothing was done."""
    order = operation.hands.an_order()
    with before_deadline(order, POLICY):
        _pay(operation, order)


@atomically
def pay_among_other_things(operation: Operation) -> None:
    order = operation.hands.an_order()
    try:
        with before_deadline(order, POLICY):
            _pay(operation, order)
    except DeadlinePassed:
        operation.note(claim("pay", order.pk, POLICY, answer="too late"))


@atomically
def pay_in_time(operation: Operation) -> None:
    """As a view for which the deadline itself decides. The order stays locked when the guard refuses."""
    order, asked = locked(operation.hands.an_order()), in_(0)
    try:
        with before_deadline(order, POLICY, strict=True):
            _pay(operation, order, "pay_in_time", asked=asked)
    except DeadlinePassed:
        operation.note(claim("pay_in_time", order.pk, POLICY, answer="too late", asked=asked, heard=in_(0)))


@atomically
def pay_and_change_ones_mind(operation: Operation) -> None:
    order = operation.hands.an_order()
    with before_deadline(order, POLICY):
        order.status = "paid"
        order.save()
        raise Undo


def _pay(operation: Operation, order: Order, verb: str = "pay", **what: Any) -> None:
    was = order.status
    if was == "unpaid":
        order.status = "paid"
        order.save()
    operation.note(claim(verb, order.pk, POLICY, answer="paid" if was == "unpaid" else f"was {was}", **what))


@atomically
def pay_conditionally(operation: Operation) -> None:
    """Pay by a conditional UPDATE without the guard, with or without a sync."""
    order = operation.hands.an_order()
    if not Order.objects.filter(pk=order.pk, status="unpaid").update(status="paid"):
        raise Undo
    tells = operation.random.random() < 0.5
    if tells:
        sync_timeouts(order)
    operation.note(claim("pay", order.pk, POLICY, answer="paid" if tells else "paid silently"))
