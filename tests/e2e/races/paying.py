"""Five ways in which "it was paid" can meet "it was cancelled, as nobody had paid": four right ones, and one wrong.

Each takes an order as a view has read it some time ago, stale by now, and answers True: paid, or False: too late.
"""

from __future__ import annotations

from collections.abc import Callable

from django.db import transaction

from django_delayq import DeadlinePassed, before_deadline, cancel_timeout, sync_timeouts
from tests.testapp.models import Order

Payment = Callable[[Order], bool]


def pay_before_deadline(order: Order) -> bool:
    """The guard locks and refreshes the order, and cancels the timeout; the block runs only if that was in time."""
    try:
        with before_deadline(order, "cancel_unpaid"):
            order.status = "paid"
            order.save()
    except DeadlinePassed:
        return False
    return True


def pay_if_cancelled_in_time(order: Order) -> bool:
    """What `cancel_timeout` answers holds until the end of the transaction, and is obeyed."""
    with transaction.atomic():
        if not cancel_timeout(order, "cancel_unpaid"):
            return False
        order.status = "paid"
        order.save()
        return True


def pay_after_locking(order: Order) -> bool:
    """Nothing of this library: the row is locked before it is read, and what it says then is obeyed."""
    with transaction.atomic():
        fresh = Order.objects.select_for_update().get(pk=order.pk)
        if fresh.status != "unpaid":
            return False
        fresh.status = "paid"
        fresh.save()
        return True


def pay_by_conditional_update(order: Order) -> bool:
    """One statement compares and sets. No signal tells of it, so every other payment says it with `sync_timeouts`.

    The timeouts of the rest find their condition false when they are due.
    """
    won = Order.objects.filter(pk=order.pk, status="unpaid").update(status="paid") == 1
    if won and order.pk % 2:
        sync_timeouts(order)
    return won


def pay_blindly(order: Order) -> bool:
    """The wrong way: a read, then a save of what was read, without a lock. No library can stop it."""
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
