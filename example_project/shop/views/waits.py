"""What an order or a trial waits for, and what its timeouts have done, in words."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from django.urls import reverse

from shop.models import CancelReason
from shop.templatetags.shop import policy_name, span

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from django_delayq.models import Timeout
    from shop.models import Order


@dataclass(frozen=True, slots=True)
class Words:
    """The words for a policy: before and after the countdown, and for each outcome."""

    label: str
    otherwise: str
    fired: str
    since: str
    """The name of the event from which the deadline counts; empty: the deadline itself is given."""
    step: str = ""
    """The step of the order that prevents it."""


WORDS = {
    "cancel_unpaid": Words(
        "Time left to pay", "Pay, or wait: unpaid orders are cancelled.", "Cancelled as unpaid", "the order", "Paid"
    ),
    "cancel_unaccepted": Words(
        "Time left to accept",
        "Accept, or wait: otherwise the order is cancelled.",
        "Cancelled as not accepted",
        "the payment",
        "Accepted",
    ),
    "remind_late_delivery": Words(
        "Promised within", "Deliver, or wait: if late, the customer is notified.", "Text message sent", "", "Delivered"
    ),
    "review_by_default": Words(
        "Time left to review",
        "Review it, or wait: then it has five stars.",
        "Five stars by default",
        "the delivery",
        "Reviewed",
    ),
    "notify_trial_expiry": Words(
        "Trial ends in", "Then the customer gets a text message.", "The trial is over", "its start"
    ),
}


@dataclass(frozen=True, slots=True)
class Wait:
    """A timeout that waits for its deadline, or for its next attempt."""

    timeout: Timeout
    words: Words
    ask_at: str = ""
    """The URL where the script of the page gets the current deadline."""


@dataclass(frozen=True, slots=True)
class Progress:
    """An order with its steps so far, its timeouts, and what has come of them."""

    order: Order
    way: list[tuple[str, datetime | None]]
    timeouts: list[Timeout]
    wait: Wait | None
    results: list[str]
    steps: dict[str, str]
    """The possible steps, the usual one first: the name in the URL, and the label of the button."""

    @property
    def version(self) -> str:
        """Return a string that changes with all that the pages show of the order."""
        rows = ((row.pk, row.state, row.attempts, row.due_at, row.run_at) for row in self.timeouts)
        return version_of(self.order.status, self.way, *rows)


def progress_of(order: Order) -> Progress:
    """Return the progress of this order. Without queries if the order was read with its parts and their timeouts."""
    parts = [order, getattr(order, "delivery", None), getattr(order, "review", None)]
    timeouts: list[Timeout] = [row for part in parts if part is not None for row in part.timeouts.all()]
    timeouts.sort(key=lambda row: row.pk)
    way = way_of(order)
    done = {step for step, at in way if at}
    return Progress(
        order=order,
        way=way,
        timeouts=timeouts,
        wait=wait_of(timeouts, reverse("shop:time-to-pay", args=[order.reference])),
        results=[_result(row, row.settled_at, done) for row in timeouts if row.settled_at],
        steps=_steps(order),
    )


def wait_of(timeouts: Iterable[Timeout], time_to_pay: str = "") -> Wait | None:
    """Return the first of these timeouts that waits, or None."""
    for row in timeouts:
        if row.is_waiting:
            name = policy_name(row.policy)
            return Wait(row, WORDS[name], time_to_pay if name == "cancel_unpaid" else "")
    return None


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


def _steps(order: Order) -> dict[str, str]:
    match order.status:
        case order.Status.UNPAID:
            return {"pay": "Pay now", "cancel": "Cancel the order"}
        case order.Status.PAID:
            return {"accept": "Accept, as the merchant", "cancel": "Cancel the order"}
        case order.Status.ACCEPTED if order.delivery.handed_over_at:
            return {"deliver": "Deliver, as the courier"}
        case order.Status.ACCEPTED:
            return {"deliver": "Deliver, as the courier", "hand-over": "Hand over to the courier"}
        case order.Status.CANCELLED if order.cancel_reason == CancelReason.UNPAID:
            return {"pay": "Pay all the same"}
    return {}


def _result(row: Timeout, settled_at: datetime, done: set[str]) -> str:
    """Return what has come of a settled timeout, as a sentence."""
    words = WORDS[policy_name(row.policy)]
    if row.state == row.State.CANCELLED:
        step = words.step if words.step in done else "Cancelled by the customer"
        return f"{step}, {span(row.due_at - settled_at)} before the deadline."
    if row.state != row.State.FIRED:
        return f"{policy_name(row.policy)} is {row.get_state_display()}."
    parts = [words.fired, f"{span(timedelta(seconds=row.lateness() or 0))} late"]
    if words.since and row.since_at:
        parts.insert(1, f"{span(settled_at - row.since_at)} after {words.since}")
    if row.attempts > 1:
        parts.append(f"with attempt {row.attempts}")
    return f"{', '.join(parts)}."
