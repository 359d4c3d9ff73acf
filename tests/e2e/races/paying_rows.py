"""Four ways to pay a purchase by a row of its own, which its policy watches, while it may be lost.

Each gets a purchase as a view has read it earlier, and returns True: it has its payment, or False: it is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.admin import AdminSite, ModelAdmin, TabularInline
from django.contrib.auth import get_user_model
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_delayq import DeadlinePassed, before_deadline
from django_delayq.admin import TimeoutAdminMixin
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


class PaymentInline(TabularInline):  # type: ignore[type-arg] # not subscriptable when it runs
    model = Payment
    extra = 0


class PurchaseAdmin(TimeoutAdminMixin, ModelAdmin):  # type: ignore[type-arg]
    inlines = (PaymentInline,)
    fields = readonly_fields = ("status",)

    def response_change(self, request: HttpRequest, obj: Purchase) -> HttpResponse:
        return HttpResponse(obj.status)


def pay_in_the_admin(purchase: Purchase) -> bool:
    """Add the payment on the page of its purchase, which saves that, too."""
    user, _ = get_user_model().objects.get_or_create(username="clerk", is_superuser=True, is_staff=True)
    form = {"payments-TOTAL_FORMS": "1", "payments-INITIAL_FORMS": "0", "payments-0-status": "captured"}
    request: Any = RequestFactory().post("/", {**form, "payments-0-purchase": str(purchase.pk)})
    request.user, request._dont_enforce_csrf_checks = user, True
    answer: Any = PurchaseAdmin(Purchase, AdminSite()).change_view(request, str(purchase.pk))
    assert answer.status_code == 200, answer
    return bool(answer.content == b"unpaid")


ROW_WAYS: dict[str, Callable[[Any], bool]] = {
    "view": pay_in_a_view,
    "webhook": pay_in_a_webhook,
    "outside": pay_outside_a_transaction,
    "admin": pay_in_the_admin,
}
