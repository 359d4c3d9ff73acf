"""The five policies of the shop. Saving an object schedules and cancels their timeouts.

The delays are functions, because demo and replay shorten them. In your project, `after=timedelta(minutes=30)` is
sufficient.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from django.db.models import Q

from django_delayq import Retry, timeout_policy
from shop.delays import shop_delay
from shop.models import CancelReason, Delivery, Order, Review, TrialMembership
from shop.sms import send_sms

if TYPE_CHECKING:
    from django_delayq.models import Timeout

DEFAULT_SCORE = 5
# If the provider does not answer, it is called again after 5 s, and then less and less often, for some hours.
SMS_RETRY = Retry.exponential(base=5, factor=1.1, max=timedelta(minutes=5), times=100)


@timeout_policy(
    Order,
    since="placed_at",
    after=lambda order: shop_delay("cancel_unpaid"),
    when=Q(status=Order.Status.UNPAID),
    search="reference",
    owner="customer",
)
def cancel_unpaid(order: Order, timeout: Timeout) -> None:
    """Cancel an order that is not paid within 30 minutes."""
    order.cancel(reason=CancelReason.UNPAID)


@timeout_policy(
    Order,
    since="paid_at",
    after=lambda order: shop_delay("cancel_unaccepted"),
    when=Q(status=Order.Status.PAID),
)
def cancel_unaccepted(order: Order, timeout: Timeout) -> None:
    """Cancel an order that the merchant does not accept within five minutes of the payment."""
    order.cancel(reason=CancelReason.UNACCEPTED)


@timeout_policy(
    Delivery,
    since=Delivery.remind_from,
    after=timedelta(0),
    when=Q(delivered_at=None),
    search="order__reference",
    owner="order__customer",
    retry=SMS_RETRY,
    atomic=False,  # a provider may need seconds to respond, and the row must not stay locked during the call
)
def remind_late_delivery(delivery: Delivery, timeout: Timeout) -> None:
    """Send the customer one text message if the parcel is late."""
    order = delivery.order
    send_sms(
        order.customer.phone,
        f"Your order {order.reference} is late. We are sorry.",
        key=timeout.idempotency_key,
    )


@timeout_policy(
    Review,
    since="asked_at",
    after=lambda review: shop_delay("review_by_default"),
    when=Q(answered_at=None),
    search="order__reference",
    owner="order__customer",
)
def review_by_default(review: Review, timeout: Timeout) -> None:
    """Count a review that is missing a week after the delivery as five stars."""
    review.answer(DEFAULT_SCORE, by_default=True)


@timeout_policy(
    TrialMembership,
    since="started_at",
    after=lambda trial: shop_delay("notify_trial_expiry"),
    when=Q(status=TrialMembership.Status.RUNNING),
    owner="customer",
    retry=SMS_RETRY,
)
def notify_trial_expiry(trial: TrialMembership, timeout: Timeout) -> None:
    """End the trial after three days, and notify the customer."""
    trial.expire()
    send_sms(trial.customer.phone, "Your free trial is over. Become a member any time.", key=timeout.idempotency_key)
