"""Ways to pay for what may be cancelled at the same time, and a process that pays, each at its planned time.

Each way gets an object as a view has read it earlier, and returns True: paid, or False: too late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils import timezone

from django_delayq import DeadlinePassed, before_deadline, cancel_timeout, sync_timeouts
from django_delayq.sql.now import database_now
from tests.testapp.market import Payment, Purchase
from tests.testapp.models import Order

Pay = Callable[[Any], bool]

# Orders


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
        return pay_blindly(Order.objects.select_for_update().get(pk=order.pk))


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


RIGHT_WAYS: dict[str, Pay] = {
    "before_deadline": pay_before_deadline,
    "cancel_timeout": pay_if_cancelled_in_time,
    "lock_first": pay_after_locking,
    "conditional_update": pay_by_conditional_update,
}

# Purchases, by a row of its own, which the policy watches


def pay_in_a_view(purchase: Purchase) -> bool:
    """Use the guard."""
    try:
        with before_deadline(purchase, "lose_unpaid"):
            Payment.objects.create(purchase=purchase, status="captured")
    except DeadlinePassed:
        return False
    return True


def pay_outside_a_transaction(purchase: Purchase) -> bool:
    """Write the payment, whatever happened, which is committed at once, and then read its purchase."""
    Payment.objects.create(purchase_id=purchase.pk, status="captured")
    return Purchase.objects.get(pk=purchase.pk).status == "unpaid"


@transaction.atomic
def pay_by_saving(purchase: Purchase) -> bool:
    """Capture the payment that is open, in one transaction, and then read its purchase."""
    payment = Payment.objects.filter(purchase_id=purchase.pk).first()
    if payment is not None:
        payment.status = "captured"
        payment.save()
    return Purchase.objects.get(pk=purchase.pk).status == "unpaid"


ROW_WAYS: dict[str, Pay] = {
    "view": pay_in_a_view,
    "outside": pay_outside_a_transaction,
    "webhook": transaction.atomic(pay_outside_a_transaction),
    "save": pay_by_saving,
}


def pay(way: str, share: Sequence[tuple[int, float]]) -> list[tuple[int, bool]]:
    """Pay `share`, keys of objects with times in Unix time by the clock of the database, in this order.

    Return each key with the result of the payment.
    """
    model: Any = Purchase if way in ROW_WAYS else Order
    payment = {**RIGHT_WAYS, **ROW_WAYS}[way]
    first = model.objects.create(created_at=timezone.now())
    payment(model.objects.get(pk=first.pk))  # it does not count, because it is many times slower than the next ones
    first.delete()
    ahead = _database_is_ahead_by()
    answers = []
    for pk, moment in share:
        obj = model.objects.get(pk=pk)  # as a view reads it, some time before it decides
        # Not to wait for anything to happen: this is the planned instant of the race.
        time.sleep(max(0.0, moment - ahead - time.time()))
        answers.append((pk, payment(obj)))
    return answers


def _database_is_ahead_by() -> float:
    """Return the seconds by which the clock of the database is ahead, from the fastest of several queries."""
    looks = []
    for _ in range(10):
        began = time.time()
        there: datetime = database_now(DEFAULT_DB_ALIAS)
        ended = time.time()
        looks.append((ended - began, there.timestamp() - (began + ended) / 2))
    return min(looks)[1]
