"""The current deadline of an order, and what happens then."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.urls import reverse

from django_delayq import get_deadline
from shop.models import Order

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models import Model

    from django_delayq.models import Timeout
    from shop.models import TrialMembership


@dataclass(frozen=True, slots=True)
class Wait:
    """A deadline and its captions: `label` before the countdown, `otherwise` after it."""

    due_at: datetime
    label: str
    otherwise: str
    ask_at: str = ""
    """The URL where the script of the page gets the current deadline."""


def wait_of(order: Order) -> Wait | None:
    """Return the next deadline of this order, or None if no timeout is pending."""
    status = order.status
    if status == Order.Status.UNPAID:
        ask_at = reverse("shop:time-to-pay", args=[order.reference])
        return _wait(order, "cancel_unpaid", "Time left to pay", "Unpaid orders are cancelled.", ask_at)
    if status == Order.Status.PAID:
        return _wait(order, "cancel_unaccepted", "Time left to accept", "Otherwise the order is cancelled.")
    if status == Order.Status.ACCEPTED:
        return _wait(order.delivery, "remind_late_delivery", "Promised within", "If late, the customer is notified.")
    if status == Order.Status.DELIVERED and hasattr(order, "review"):
        return _wait(order.review, "review_by_default", "Time left to review", "Otherwise it counts as five stars.")
    return None


def trial_wait(trial: TrialMembership) -> Wait | None:
    """Return the end of a running trial."""
    return _wait(trial, "notify_trial_expiry", "Trial ends in", "Then the customer gets a text message.")


def story_of(order: Order) -> list[Timeout]:
    """Return all timeouts of this order and its objects, oldest first."""
    parts = [order, getattr(order, "delivery", None), getattr(order, "review", None)]
    rows: list[Timeout] = [row for part in parts if part is not None for row in part.timeouts.all()]
    return sorted(rows, key=lambda row: row.id)


def way_of(order: Order) -> list[tuple[str, datetime | None]]:
    """Return the steps of the order with their times, without the future steps of a cancelled order."""
    acceptance = getattr(order, "acceptance", None)
    delivery = getattr(order, "delivery", None)
    review = getattr(order, "review", None)
    way = [
        ("Placed", order.placed_at),
        ("Paid", order.paid_at),
        ("Accepted", acceptance and acceptance.accepted_at),
        ("With the courier", delivery and delivery.handed_over_at),
        ("Delivered", delivery and delivery.delivered_at),
        ("Reviewed", review and review.answered_at),
    ]
    return [(step, at) for step, at in way if at or not order.cancelled_at]


def version_of(*parts: object) -> str:
    """Return a short string that changes with `parts`, by which an open page detects that it is outdated."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _wait(obj: Model, policy: str, label: str, otherwise: str, ask_at: str = "") -> Wait | None:
    due_at = get_deadline(obj, policy)
    return None if due_at is None else Wait(due_at, label, otherwise, ask_at)
