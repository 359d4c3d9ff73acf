"""The views that show something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.paginator import Paginator
from django.shortcuts import get_object_or_404, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from django_delayq import Deadline
from shop.forms import OrderForm, ReviewForm
from shop.models import Customer, Order, TextMessage
from shop.views.waits import story_of, trial_wait, version_of, wait_of, way_of

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

ORDERS_A_PAGE = 12


@never_cache
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """Show the newest orders and the form for a new one."""
    orders = Order.objects.select_related("customer").annotate(
        pay_until=Deadline("cancel_unpaid"), accept_until=Deadline("cancel_unaccepted")
    )
    page = Paginator(orders, ORDERS_A_PAGE).get_page(request.GET.get("page"))
    known = Customer.objects.filter(reference=request.session.get("customer", "")).first()
    form = OrderForm(initial={"name": known.name, "phone": known.phone} if known else None)
    version = version_of(*((order.pk, order.status) for order in page))
    return render(request, "shop/index.html", {"page": page, "form": form, "version": version})


@never_cache
@require_safe
def order(request: HttpRequest, reference: str) -> HttpResponse:
    """Show an order: its progress, its deadline, the possible steps, and its timeouts."""
    shown = _get_order(reference)
    wait, story, way = wait_of(shown), story_of(shown), way_of(shown)
    context = {
        "order": shown,
        "wait": wait,
        "story": story,
        "way": way,
        "version": version_of(shown.status, way, wait, *((row.id, row.state, row.due_at) for row in story)),
        "review_form": ReviewForm(),
        "reminded": any(row.policy.endswith(".remind_late_delivery") and row.state == "fired" for row in story),
    }
    return render(request, "shop/order.html", context)


@never_cache
@require_safe
def customer(request: HttpRequest, reference: str) -> HttpResponse:
    """Show a customer: the trial membership, the orders, the text messages."""
    shown = get_object_or_404(Customer.objects.select_related("trial"), reference=reference)
    wait = trial_wait(shown.trial)
    orders = shown.orders.all()[:ORDERS_A_PAGE]
    texts = TextMessage.objects.filter(recipient=shown.phone)[:ORDERS_A_PAGE]
    context = {
        "customer": shown,
        "trial": shown.trial,
        "wait": wait,
        "orders": orders,
        "texts": texts,
        "version": version_of(shown.trial.status, wait, len(texts), *(order.status for order in orders)),
    }
    return render(request, "shop/customer.html", context)


def _get_order(reference: str) -> Order:
    related = Order.objects.select_related("customer__trial", "acceptance", "delivery", "review")
    return get_object_or_404(related, reference=reference)
