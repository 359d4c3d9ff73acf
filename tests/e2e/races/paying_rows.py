"""Ways to pay a purchase by a row of its own, which its policy watches, while it may be lost.

Each gets a purchase as a view has read it earlier, and returns True: it has its payment, or False: it is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import transaction

from django_delayq import DeadlinePassed, before_deadline
from tests.testapp.market import Payment, Purchase


def pay_in_a_view(purchase: Purchase) -> bool:
    """Use the guard."""
    try:
        with before_deadline(purchase, "lose_unpaid"):
            Payment.objects.create(purchase=purchase, status="captured")
    except DeadlinePassed:
        return False
    return True


def pay_in_a_webhook(purchase: Purchase) -> bool:
    """Write the payment, whatever happened, and then read its purchase, in one transaction."""
    with transaction.atomic():
        Payment.objects.create(purchase_id=purchase.pk, status="captured")
        return Purchase.objects.get(pk=purchase.pk).status == "unpaid"


def pay_outside_a_transaction(purchase: Purchase) -> bool:
    """Write the payment, which is committed at once, and then read its purchase."""
    Payment.objects.create(purchase_id=purchase.pk, status="captured")
    return Purchase.objects.get(pk=purchase.pk).status == "unpaid"


def pay_by(write: Callable[[Any], object], purchase: Purchase) -> bool:
    """Capture the payment that is open, in one transaction, and then read its purchase."""
    with transaction.atomic():
        write(Payment.objects.filter(purchase_id=purchase.pk))
        return Purchase.objects.get(pk=purchase.pk).status == "unpaid"


def save(payment: Payment | None) -> None:
    if payment is not None:
        payment.status = "captured"
        payment.save()


ROW_WAYS: dict[str, Callable[[Any], bool]] = {
    "view": pay_in_a_view,
    "webhook": pay_in_a_webhook,
    "outside": pay_outside_a_transaction,
    "save": partial(pay_by, lambda rows: save(rows.first())),
    "update": partial(pay_by, lambda rows: rows.update(status="captured")),
    "upsert": partial(pay_by, lambda rows: rows.update_or_create(defaults={"status": "captured"})),
    "locked": partial(pay_by, lambda rows: save(rows.select_for_update().first())),
}
