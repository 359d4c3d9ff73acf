"""The views that show something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.shortcuts import get_object_or_404, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from shop.forms import ReviewForm
from shop.models import Customer, Order, Outage, TextMessage
from shop.plays import PLAYS
from shop.views.waits import progress_of, version_of, wait_of

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

PLAYED = 4
ORDERS_A_PAGE = 12


@never_cache
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """Show the plays, the newest orders of this visitor, and the operator's first page beside them."""
    orders = _orders().filter(customer__reference=request.session.get("customer", ""))[:PLAYED]
    played = [progress_of(order) for order in orders]
    context = {
        "plays": PLAYS,
        "played": played,
        "is_sms_broken": Outage.objects.exists(),
        "version": version_of(*(one.version for one in played)),
    }
    return render(request, "shop/index.html", context)


@never_cache
@require_safe
def order(request: HttpRequest, reference: str) -> HttpResponse:
    """Show an order: its progress, its deadline, the possible steps, and its timeouts."""
    progress = progress_of(get_object_or_404(_orders(), reference=reference))
    context = {"order": progress.order, "progress": progress, "review_form": ReviewForm(label_suffix="")}
    return render(request, "shop/order.html", context)


@never_cache
@require_safe
def customer(request: HttpRequest, reference: str) -> HttpResponse:
    """Show a customer: the trial membership, the orders, the text messages."""
    shown = get_object_or_404(Customer.objects.select_related("trial"), reference=reference)
    wait = wait_of(shown.trial.timeouts.all())
    orders = shown.orders.all()[:ORDERS_A_PAGE]
    texts = TextMessage.objects.filter(recipient=shown.phone)[:ORDERS_A_PAGE]
    context = {
        "customer": shown,
        "trial": shown.trial,
        "wait": wait,
        "orders": orders,
        "texts": texts,
        "version": version_of(
            shown.trial.status, wait and wait.timeout.run_at, len(texts), *(order.status for order in orders)
        ),
    }
    return render(request, "shop/customer.html", context)


def _orders() -> QuerySet[Order]:
    """Return all orders, with all that their progress needs."""
    related = Order.objects.select_related("customer__trial", "acceptance", "delivery", "review")
    return related.prefetch_related("timeouts", "delivery__timeouts", "review__timeouts")
