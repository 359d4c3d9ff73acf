"""The order: one status, moved by a method for each step, and never by assignment from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models
from django.db.models import Q
from django.urls import reverse

from django_delayq import TimeoutRelation, clock
from shop.models.customers import Customer, TrialMembership
from shop.models.references import new_reference

if TYPE_CHECKING:
    from datetime import datetime

    from shop.models.steps import Acceptance, Delivery, Review


class StepRefused(Exception):
    """The order's status does not allow this step; the message says so to a customer."""


class CancelReason(models.TextChoices):
    """Why an order came to nothing."""

    UNPAID = "unpaid", "not paid in time"
    UNACCEPTED = "unaccepted", "not accepted by the merchant in time"
    CUSTOMER = "customer", "by the customer"


class OrderManager(models.Manager["Order"]):
    """Orders, and how they begin."""

    def place(self, customer: Customer, product: str, price_cents: int, *, reference: str = "") -> Order:
        """A new, unpaid order; with it the customer's trial membership begins, or begins again."""
        moment = clock.now()
        trial = TrialMembership.objects.filter(customer=customer).first() or TrialMembership(customer=customer)
        if trial.status != TrialMembership.Status.CONVERTED:
            trial.begin(moment)
        return self.create(
            reference=reference or new_reference(),
            customer=customer,
            product=product,
            price_cents=price_cents,
            placed_at=moment,
        )

    def lock(self, pk: int) -> Order:
        """The order, fresh, and ours until the transaction ends. Only inside `atomic()`."""
        return self.select_for_update().get(pk=pk)


class Order(models.Model):
    """One product for one customer.

    The steps (`pay`, `accept`, ...) write what they change and refuse what the status does not allow. Whoever
    calls them holds the row's lock: `before_deadline` and the handlers of `timeouts.py` do, `Order.objects.lock`
    does. Two who read and then save without one would overwrite each other.
    """

    class Status(models.TextChoices):
        UNPAID = "unpaid"
        PAID = "paid"
        ACCEPTED = "accepted", "Under way"
        DELIVERED = "delivered"
        CANCELLED = "cancelled"

    reference = models.CharField(max_length=64, unique=True, default=new_reference, editable=False)
    customer = models.ForeignKey(Customer, on_delete=models.CASCADE, related_name="orders")
    product = models.CharField(max_length=100)
    price_cents = models.PositiveIntegerField()
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.UNPAID, db_index=True)
    placed_at = models.DateTimeField(db_index=True)
    paid_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)
    cancel_reason = models.CharField(max_length=10, choices=CancelReason.choices, blank=True)

    timeouts = TimeoutRelation()
    objects = OrderManager()

    acceptance: Acceptance
    delivery: Delivery
    review: Review

    class Meta:
        ordering = ["-placed_at", "-id"]
        constraints = [
            models.CheckConstraint(
                name="shop_order_paid_has_moment",
                condition=Q(status="unpaid", paid_at=None) | Q(status="cancelled") | Q(paid_at__isnull=False),
            ),
            models.CheckConstraint(
                name="shop_order_cancelled_has_reason",
                condition=(Q(status="cancelled", cancelled_at__isnull=False) & ~Q(cancel_reason=""))
                | (~Q(status="cancelled") & Q(cancelled_at=None, cancel_reason="")),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.reference} ({self.product})"

    def get_absolute_url(self) -> str:
        return reverse("shop:order", args=[self.reference])

    @property
    def price(self) -> str:
        return f"{self.price_cents / 100:.2f}"

    def pay(self) -> None:
        """Paid: from now on the merchant's clock runs."""
        self._require("paid", self.Status.UNPAID)
        self.status, self.paid_at = self.Status.PAID, clock.now()
        self.save(update_fields=["status", "paid_at"])

    def accept(self, merchant: str, promised_at: datetime | None, *, handed_over: bool = False) -> None:
        """Accepted and under way; `promised_at` is the merchant's word to the customer, if there is one.

        With `handed_over` the courier has the parcel already.
        """
        from shop.models.steps import Acceptance, Delivery

        self._require("accepted", self.Status.PAID)
        moment = clock.now()
        self.status = self.Status.ACCEPTED
        self.save(update_fields=["status"])
        Acceptance.objects.create(order=self, merchant=merchant, accepted_at=moment)
        Delivery.objects.create(
            order=self, started_at=moment, promised_at=promised_at, handed_over_at=moment if handed_over else None
        )

    def hand_over(self) -> None:
        """The parcel is with the courier."""
        self._require("handed over", self.Status.ACCEPTED)
        if self.delivery.handed_over_at is not None:
            raise StepRefused("This parcel is with the courier already.")
        self.delivery.handed_over_at = clock.now()
        self.delivery.save(update_fields=["handed_over_at"])

    def deliver(self) -> None:
        """At the customer's door. A review is asked for, unless there is one already."""
        from shop.models.steps import Review

        self._require("delivered", self.Status.ACCEPTED)
        moment = clock.now()
        self.status = self.Status.DELIVERED
        self.save(update_fields=["status"])
        self.delivery.delivered_at = moment
        self.delivery.save(update_fields=["delivered_at"])
        if not Review.objects.filter(order=self).exists():
            Review.objects.create(order=self, asked_at=moment)

    def cancel(self, *, reason: str) -> None:
        """Cancelled for `reason`, one of `CancelReason`. Too late once the merchant has accepted."""
        self._require("cancelled", self.Status.UNPAID, self.Status.PAID)
        self.status, self.cancelled_at, self.cancel_reason = self.Status.CANCELLED, clock.now(), CancelReason(reason)
        self.save(update_fields=["status", "cancelled_at", "cancel_reason"])

    def _require(self, step: str, *allowed: Status) -> None:
        if self.status not in allowed:
            state = f"was cancelled: {self.get_cancel_reason_display()}" if self.cancelled_at else f"is {self.status}"
            raise StepRefused(f"Order {self.reference} cannot be {step}: it {state}.")
