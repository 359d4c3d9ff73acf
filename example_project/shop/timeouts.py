"""The shop's five timeouts. Nothing else in the shop knows of them: saving an object arms and cancels them.

Every delay is looked up when it is needed, because demo and replay shorten them. In a shop of your own,
`after=timedelta(minutes=30)` is all that it takes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from django.db.models import Q

from django_delayq import timeout_policy
from shop.delays import shop_delay
from shop.models import CancelReason, Delivery, Order, Review, TrialMembership
from shop.sms import send_sms

if TYPE_CHECKING:
    from django_delayq.models import Timeout

DEFAULT_SCORE = 5


@timeout_policy(
    Order,
    since="placed_at",
    after=lambda order: shop_delay("cancel_unpaid"),
    when=Q(status=Order.Status.UNPAID),
)
def cancel_unpaid(order: Order, timeout: Timeout) -> None:
    """Half an hour after it was placed, an unpaid order is cancelled."""
    order.cancel(reason=CancelReason.UNPAID)


@timeout_policy(
    Order,
    since="paid_at",
    after=lambda order: shop_delay("cancel_unaccepted"),
    when=Q(status=Order.Status.PAID),
)
def cancel_unaccepted(order: Order, timeout: Timeout) -> None:
    """Five minutes after the payment, an order that no merchant has accepted is cancelled."""
    order.cancel(reason=CancelReason.UNACCEPTED)


@timeout_policy(
    Delivery,
    since=Delivery.remind_from,
    after=timedelta(0),
    when=Q(delivered_at=None),
    atomic=False,  # a provider may take seconds to answer, and the parcel's row must not stay locked meanwhile
)
def remind_late_delivery(delivery: Delivery, timeout: Timeout) -> None:
    """A parcel that is still under way at the promised time: the customer gets a text message, never two."""
    order = delivery.order
    send_sms(
        order.customer.phone,
        f"Your order {order.reference} is late. We are sorry, and on to it.",
        key=timeout.idempotency_key,
    )


@timeout_policy(
    Review,
    since="asked_at",
    after=lambda review: shop_delay("review_by_default"),
    when=Q(answered_at=None),
)
def review_by_default(review: Review, timeout: Timeout) -> None:
    """A week after the delivery, whoever said nothing was content."""
    review.answer(DEFAULT_SCORE, by_default=True)


@timeout_policy(
    TrialMembership,
    since="started_at",
    after=lambda trial: shop_delay("notify_trial_expiry"),
    when=Q(status=TrialMembership.Status.RUNNING),
)
def notify_trial_expiry(trial: TrialMembership, timeout: Timeout) -> None:
    """After three days a trial is over, and the customer is told."""
    trial.expire()
    send_sms(trial.customer.phone, "Your free trial is over. Become a member any time.", key=timeout.idempotency_key)
