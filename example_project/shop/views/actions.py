"""The views that change something: POST only, followed by a redirect.

Every step with a deadline uses `before_deadline`: either the step succeeds and the timeout will not fire, or the
timeout has fired and the step is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import messages
from django.db import transaction
from django.http import Http404
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from django_delayq import DeadlinePassed, before_deadline
from shop.delays import shop_delay
from shop.forms import ReviewForm
from shop.models import CancelReason, Customer, Order, Outage, Review, StepRefused, TrialMembership
from shop.plays import PLAYS
from shop.timeouts import cancel_unaccepted, cancel_unpaid, notify_trial_expiry, review_by_default

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest, HttpResponse

MERCHANT = "The Corner Shop"


@require_POST
def play(request: HttpRequest, name: str) -> HttpResponse:
    """Place an order of this visitor, and take the first steps of the play."""
    if name not in PLAYS:
        raise Http404(f"There is no play {name!r}.")
    chosen = PLAYS[name]
    with transaction.atomic():
        order = Order.objects.place(_visitor(request), chosen.product, chosen.price_cents)
    if chosen.breaks_sms:
        Outage.objects.create(began_at=timezone.now())
    for step in chosen.steps:
        _take(request, order, step)
    return _to_plays()


@require_POST
def repair_sms(request: HttpRequest) -> HttpResponse:
    """End the outage of the SMS provider; the next attempts succeed."""
    Outage.objects.all().delete()
    return _to_plays()


def _to_plays() -> HttpResponse:
    return redirect(f"{reverse('shop:index')}#orders")


def _visitor(request: HttpRequest) -> Customer:
    """Return the customer of this session, who may be new."""
    known = Customer.objects.filter(reference=request.session.get("customer", "")).first()
    customer = known or Customer.objects.create(name="Visitor", phone="+44 20 7946 0018")
    request.session["customer"] = customer.reference
    return customer


def _pay(order: Order) -> None:
    with before_deadline(order, cancel_unpaid):
        order.pay()


def _accept(order: Order) -> None:
    with before_deadline(order, cancel_unaccepted):
        order.accept(MERCHANT, timezone.now() + shop_delay("promised_delivery"))


def _hand_over(order: Order) -> None:
    with transaction.atomic():
        Order.objects.lock(order.pk).hand_over()


def _deliver(order: Order) -> None:
    with transaction.atomic():
        Order.objects.lock(order.pk).deliver()


def _cancel(order: Order) -> None:
    with transaction.atomic():
        Order.objects.lock(order.pk).cancel(reason=CancelReason.CUSTOMER)


STEPS: dict[str, tuple[Callable[[Order], None], str]] = {
    "pay": (_pay, "Paid, thank you. The merchant has been notified."),
    "accept": (_accept, "Accepted. The parcel can be packed."),
    "hand-over": (_hand_over, "The courier has the parcel."),
    "deliver": (_deliver, "Delivered."),
    "cancel": (_cancel, "The order is cancelled."),
}


@require_POST
def take_step(request: HttpRequest, reference: str, step: str) -> HttpResponse:
    """Perform one step of an order, or refuse it with a message."""
    if step not in STEPS:
        raise Http404(f"There is no step {step!r}.")
    order = get_object_or_404(Order, reference=reference)
    _take(request, order, step)
    return _to_plays() if "plays" in request.POST else redirect(order)


@require_POST
def review(request: HttpRequest, reference: str) -> HttpResponse:
    """Store the review of the customer, unless it was answered by default."""
    order = get_object_or_404(Order, reference=reference)
    asked = get_object_or_404(Review, order=order)
    form = ReviewForm(request.POST)
    if not form.is_valid():
        messages.error(request, "Please choose one to five stars.")
        return redirect(order)

    def answer() -> None:
        with before_deadline(asked, review_by_default):
            asked.answer(form.cleaned_data["score"], form.cleaned_data["text"])

    _answer(request, answer, "Thank you for your review.")
    return redirect(order)


@require_POST
def convert(request: HttpRequest, reference: str) -> HttpResponse:
    """Make the customer a member before the trial ends."""
    customer = get_object_or_404(Customer, reference=reference)
    trial = get_object_or_404(TrialMembership, customer=customer)

    def become_member() -> None:
        with before_deadline(trial, notify_trial_expiry):
            trial.convert()

    _answer(request, become_member, "Welcome! You are a member now.")
    return redirect(customer)


def _take(request: HttpRequest, order: Order, step: str) -> None:
    take, thanks = STEPS[step]
    _answer(request, lambda: take(order), thanks)


def _answer(request: HttpRequest, take: Callable[[], None], thanks: str) -> None:
    try:
        take()
    except DeadlinePassed as passed:
        deadline = timezone.localtime(passed.timeout.due_at)
        messages.error(
            request, f"Sorry, this came too late: the deadline was {deadline:%H:%M:%S %Z}. Nothing was changed."
        )
    except StepRefused as refused:
        messages.error(request, str(refused))
    else:
        messages.success(request, thanks)
