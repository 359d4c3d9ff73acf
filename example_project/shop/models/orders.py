"""The order. Each step that changes its status is a method; no other code assigns the status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models
from django.db.models import Q
from django.urls import reverse

from django_delayq import ArmingManager, TimeoutRelation, clock
from shop.models.customers import Customer, TrialMembership
from shop.models.references import new_reference

if TYPE_CHECKING:
    from datetime import datetime

    from shop.models.steps import Acceptance, Delivery, Review


class StepRefused(Exception):
    """The status of the order does not allow this step; the message is for the customer."""


class CancelReason(models.TextChoices):
    """Why an order was cancelled."""

    UNPAID = "unpaid", "not paid in time"
    UNACCEPTED = "unaccepted", "not accepted by the merchant in time"
    CUSTOMER = "customer", "by the customer"


class OrderManager(ArmingManager["Order"]):
    """The manager of orders. Its bulk writes schedule and cancel timeouts, too."""

    def place(self, customer: Customer, product: str, price_cents: int, *, reference: str = "") -> Order:
        """Create an unpaid order, and start the trial membership of the customer, or start it again."""
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
        """Lock the order and return it, just read. Only inside `atomic()`."""
        return self.select_for_update().get(pk=pk)


class Order(models.Model):
    """One product for one customer.

    The steps (`pay`, `accept`, ...) save their changes, and refuse a step that the status does not allow. The caller
    must hold the lock of the row, through `before_deadline`, a handler of `timeouts.py`, or `Order.objects.lock`.
    Without it, two callers could overwrite each other's changes.
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
        """Mark the order as paid, which starts the time of the merchant."""
        self._require("paid", self.Status.UNPAID)
        self.status, self.paid_at = self.Status.PAID, clock.now()
        self.save(update_fields=["status", "paid_at"])

    def accept(self, merchant: str, promised_at: datetime | None, *, handed_over: bool = False) -> None:
        """Accept the order; `promised_at` is the promised time of delivery, if there is one.

        With `handed_over` the courier already has the parcel.
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
        """Record that the courier has the parcel."""
        self._require("sent", self.Status.ACCEPTED)
        if self.delivery.handed_over_at is not None:
            raise StepRefused("The courier already has this parcel.")
        self.delivery.handed_over_at = clock.now()
        self.delivery.save(update_fields=["handed_over_at"])

    def deliver(self) -> None:
        """Record the delivery, and ask for a review unless there is one."""
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
        """Cancel the order for `reason`, one of `CancelReason`. An accepted order cannot be cancelled."""
        self._require("cancelled", self.Status.UNPAID, self.Status.PAID)
        self.status, self.cancelled_at, self.cancel_reason = self.Status.CANCELLED, clock.now(), CancelReason(reason)
        self.save(update_fields=["status", "cancelled_at", "cancel_reason"])

    def _require(self, step: str, *allowed: Status) -> None:
        if self.status not in allowed:
            state = f"was cancelled: {self.get_cancel_reason_display()}" if self.cancelled_at else f"is {self.status}"
            raise StepRefused(f"Order {self.reference} cannot be {step}: it {state}.")
