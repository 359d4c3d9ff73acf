"""Five ways to pay an order that may be cancelled at the same time: four safe ones, and a wrong one.

Each gets an order as a view has read it earlier, and returns True: paid, or False: too late.
"""

from __future__ import annotations

from collections.abc import Callable

from django.db import transaction

from django_delayq import DeadlinePassed, before_deadline, cancel_timeout, sync_timeouts
from tests.testapp.models import Order

Payment = Callable[[Order], bool]


def pay_before_deadline(order: Order) -> bool:
    """Use the guard, which locks and refreshes the order, and cancels the timeout; the block runs only if in time."""
    try:
        with before_deadline(order, "cancel_unpaid"):
            order.status = "paid"
            order.save()
    except DeadlinePassed:
        return False
    return True


def pay_if_cancelled_in_time(order: Order) -> bool:
    """Check the result of `cancel_timeout`, which is valid until the end of the transaction."""
    with transaction.atomic():
        if not cancel_timeout(order, "cancel_unpaid"):
            return False
        order.status = "paid"
        order.save()
        return True


def pay_after_locking(order: Order) -> bool:
    """Lock the row before reading it, without this library, and check its status."""
    with transaction.atomic():
        fresh = Order.objects.select_for_update().get(pk=order.pk)
        if fresh.status != "unpaid":
            return False
        fresh.status = "paid"
        fresh.save()
        return True


def pay_by_conditional_update(order: Order) -> bool:
    """Compare and set in one statement, which sends no signal. Every other payment calls `sync_timeouts`.

    The other timeouts are skipped when they are due.
    """
    won = Order.objects.filter(pk=order.pk, status="unpaid").update(status="paid") == 1
    if won and order.pk % 2:
        sync_timeouts(order)
    return won


def pay_blindly(order: Order) -> bool:
    """Save the order as it was read, without a lock: the wrong way, which no library can prevent."""
    if order.status != "unpaid":
        return False
    order.status = "paid"
    order.save()
    return True


RIGHT_WAYS: dict[str, Payment] = {
    "before_deadline": pay_before_deadline,
    "cancel_timeout": pay_if_cancelled_in_time,
    "lock_first": pay_after_locking,
    "conditional_update": pay_by_conditional_update,
}
