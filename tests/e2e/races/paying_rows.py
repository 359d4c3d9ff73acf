"""Ways to pay a purchase by a row of its own, which its policy watches, while it may be lost.

Each gets a purchase as a view has read it earlier, and returns True: it has its payment, or False: it is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib.admin import AdminSite, ModelAdmin, TabularInline
from django.contrib.auth import get_user_model
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.test import RequestFactory

from django_delayq import DeadlinePassed, before_deadline
from django_delayq.admin import TimeoutAdminMixin
from django_delayq.admin.mixins import STALE
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


class PaymentInline(TabularInline):  # type: ignore[type-arg] # not subscriptable when it runs
    model = Payment
    extra = 0


class PurchaseAdmin(TimeoutAdminMixin, ModelAdmin):  # type: ignore[type-arg]
    inlines = (PaymentInline,)
    fields = ("status",)

    def response_change(self, request: HttpRequest, obj: Purchase) -> HttpResponse:
        return HttpResponse(obj.status)


def _page(purchase: Purchase, form: dict[str, str] | None = None, address: str = "/") -> Any:
    user, _ = get_user_model().objects.get_or_create(username="clerk", is_superuser=True, is_staff=True)
    request: Any = RequestFactory().get(address) if form is None else RequestFactory().post(address, form)
    request.user, request._dont_enforce_csrf_checks = user, True
    return PurchaseAdmin(Purchase, AdminSite()).change_view(request, str(purchase.pk))


def open_in_the_admin(pk: int) -> Any:
    """Return a purchase with its page, on which its payment is captured."""
    purchase: Any = Purchase.objects.get(pk=pk)
    page = _page(purchase).context_data
    fields = [*page["adminform"].form, *(field for each in page["inline_admin_formsets"] for field in _fields(each))]
    purchase.form = {field.html_name: "" if field.value() is None else str(field.value()) for field in fields}
    purchase.form |= {name: "captured" for name in purchase.form if name.endswith("-status")}
    purchase.address = page["form_url"]
    return purchase


def _fields(inline: Any) -> list[Any]:
    formset = inline.formset
    return [field for form in (formset.management_form, *formset.forms) for field in form]


def pay_in_the_admin(purchase: Any) -> bool:
    """Capture the payment on the page of its purchase, which saves that, too."""
    answer = _page(purchase, purchase.form, purchase.address)
    if not isinstance(answer, TemplateResponse):
        return bool(answer.content == b"unpaid")
    assert answer.context_data["errors"] == [[str(STALE)]], answer.context_data["errors"]  # type: ignore[index]
    return False


ROW_WAYS: dict[str, Callable[[Any], bool]] = {
    "view": pay_in_a_view,
    "webhook": pay_in_a_webhook,
    "outside": pay_outside_a_transaction,
    "save": partial(pay_by, lambda rows: save(rows.first())),
    "update": partial(pay_by, lambda rows: rows.update(status="captured")),
    "upsert": partial(pay_by, lambda rows: rows.update_or_create(defaults={"status": "captured"})),
    "locked": partial(pay_by, lambda rows: save(rows.select_for_update().first())),
    "admin": pay_in_the_admin,
}
READS: dict[str, Callable[..., Any]] = {"admin": open_in_the_admin}
"""How a purchase is read, where not by its manager."""
