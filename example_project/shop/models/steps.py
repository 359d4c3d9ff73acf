"""The steps after the payment: acceptance, delivery, review."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models
from django.db.models import F, Q

from django_delayq import ArmingManager, TimeoutRelation, clock
from shop.models.orders import Order, StepRefused

if TYPE_CHECKING:
    from datetime import datetime


class Acceptance(models.Model):
    """The acceptance of the order by the merchant."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, related_name="acceptance")
    merchant = models.CharField(max_length=100)
    accepted_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.order} accepted by {self.merchant}"


class Delivery(models.Model):
    """The delivery, from the acceptance to the customer."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, related_name="delivery")
    started_at = models.DateTimeField()
    promised_at = models.DateTimeField(null=True, blank=True)
    handed_over_at = models.DateTimeField("handed over to the courier at", null=True, blank=True)
    delivered_at = models.DateTimeField(null=True, blank=True)

    timeouts = TimeoutRelation()
    objects = ArmingManager["Delivery"]()

    class Meta:
        verbose_name_plural = "deliveries"
        constraints = [
            models.CheckConstraint(
                name="shop_delivery_ends_after_start",
                condition=Q(delivered_at=None) | Q(delivered_at__gte=F("started_at")),
            )
        ]

    def __str__(self) -> str:
        return f"Delivery of {self.order}"

    def remind_from(self) -> datetime | None:
        """Return the time from which the parcel is late: the promised time, but not before the acceptance."""
        return None if self.promised_at is None else max(self.promised_at, self.started_at)


class ReviewManager(ArmingManager["Review"]):
    """The manager of reviews."""

    def give(self, order: Order, score: int, text: str = "") -> Review:
        """Create a review before the delivery.

        Raises:
            StepRefused: the order was cancelled.
        """
        if order.status == Order.Status.CANCELLED:
            raise StepRefused(f"Order {order.reference} was cancelled; there is nothing to review.")
        return self.create(order=order, answered_at=clock.now(), score=score, text=text)


class Review(models.Model):
    """A review. The shop asks for it on delivery; the customer answers it, or it is answered by default."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, related_name="review")
    asked_at = models.DateTimeField(null=True, blank=True)
    answered_at = models.DateTimeField(null=True, blank=True)
    score = models.PositiveSmallIntegerField(null=True, blank=True)
    text = models.TextField(blank=True)
    by_default = models.BooleanField(default=False)

    timeouts = TimeoutRelation()
    objects = ReviewManager()

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="shop_review_answer_has_score",
                condition=Q(answered_at=None, score=None) | Q(answered_at__isnull=False, score__range=(1, 5)),
            ),
            models.CheckConstraint(
                name="shop_review_asked_or_answered", condition=Q(asked_at__isnull=False) | Q(answered_at__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"Review of {self.order}"

    def answer(self, score: int, text: str = "", *, by_default: bool = False) -> None:
        """Answer the review.

        Raises:
            StepRefused: it was answered before, by the customer or by default.
        """
        if self.answered_at is not None:
            raise StepRefused("This order already has a review.")
        self.score, self.text, self.by_default = score, text, by_default
        self.answered_at = clock.now()
        self.save()
