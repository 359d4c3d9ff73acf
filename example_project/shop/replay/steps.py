"""The steps of an order, their sequence, and their effects."""

from __future__ import annotations

import enum
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.db import transaction

from django_delayq import DeadlinePassed, before_deadline
from shop.models import Customer, Order, Review, StepRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from datetime import datetime

    from django.db.models import Model

    from shop.replay.records import OrderRecord

    Guard = Callable[[Any, str], AbstractContextManager[object]]


class Step(enum.IntEnum):
    """The steps of an order; steps at the same time happen in this order.

    A review is before the delivery, so that the shop does not ask for a review that exists.
    """

    PLACED = 0
    PAID = 1
    ACCEPTED = 2
    REVIEWED = 3
    DELIVERED = 4


@dataclass(slots=True)
class Life:
    """One order during a replay. `refused_at`: the step that was too late; no other step follows it."""

    record: OrderRecord
    order: Order | None = None
    promised_at: datetime | None = None
    refused_at: Step | None = None
    done: list[Step] = field(default_factory=list)

    @property
    def placed_order(self) -> Order:
        """Return the order as it was last read from the database."""
        if self.order is None:
            raise LookupError(f"Order {self.record.order_id} is not placed yet.")
        return self.order


def steps_of(record: OrderRecord) -> Iterator[tuple[datetime, Step]]:
    """Return the times of all steps that happen."""
    moments = (record.placed_at, record.paid_at, record.accepted_at, record.reviewed_at, record.delivered_at)
    for step, moment in zip(Step, moments, strict=True):
        if moment is not None:
            yield moment, step


@contextmanager
def locked(obj: Model, policy: str) -> Iterator[None]:
    """Lock and read the row of `obj`; sufficient if no worker runs at the same time."""
    with transaction.atomic():
        obj.refresh_from_db(from_queryset=type(obj)._base_manager.select_for_update())
        yield


def take(step: Step, life: Life, guard: Guard = before_deadline) -> bool:
    """Perform `step` now, as the pages of the shop do. Return False if it was refused as too late.

    After a refused payment or acceptance, all further steps of the order are ignored.
    """
    if life.refused_at is not None:
        return False
    try:
        _DO[step](life, guard)
    except (DeadlinePassed, StepRefused):
        life.refused_at = step
        return False
    life.done.append(step)
    return True


def _place(life: Life, _: Guard) -> None:
    record = life.record
    with transaction.atomic():
        customer = Customer.objects.filter(reference=record.customer_id).first()
        if customer is None:
            name = f"Customer {record.customer_id[:9]}"
            customer = Customer.objects.create(reference=record.customer_id, name=name, phone="+55 11 5550100")
        life.order = Order.objects.place(customer, "Assorted goods", 4990, reference=record.order_id)


def _pay(life: Life, guard: Guard) -> None:
    order = life.placed_order
    with guard(order, "cancel_unpaid"):
        order.pay()


def _accept(life: Life, guard: Guard) -> None:
    order = life.placed_order
    with guard(order, "cancel_unaccepted"):
        order.accept("The merchant", life.promised_at, handed_over=True)  # the only time in the files


def _review(life: Life, guard: Guard) -> None:
    order = life.placed_order
    review = Review.objects.filter(order=order).first()
    if review is None:
        with transaction.atomic():
            Review.objects.give(Order.objects.lock(order.pk), life.record.score)
        return
    with guard(review, "review_by_default"):
        review.answer(life.record.score)


def _deliver(life: Life, _: Guard) -> None:
    with transaction.atomic():
        Order.objects.lock(life.placed_order.pk).deliver()


_DO: dict[Step, Callable[[Life, Guard], None]] = {
    Step.PLACED: _place,
    Step.PAID: _pay,
    Step.ACCEPTED: _accept,
    Step.REVIEWED: _review,
    Step.DELIVERED: _deliver,
}
