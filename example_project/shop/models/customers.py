"""Customers, and the trial membership that comes with an order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models
from django.db.models import Q
from django.urls import reverse

from django_delayq import ArmingManager, TimeoutRelation, clock
from shop.models.references import new_reference

if TYPE_CHECKING:
    from datetime import datetime


class Customer(models.Model):
    """A person who orders."""

    reference = models.CharField(max_length=64, unique=True, default=new_reference, editable=False)
    name = models.CharField(max_length=100)
    phone = models.CharField(max_length=30)

    trial: TrialMembership

    def __str__(self) -> str:
        return self.name

    def get_absolute_url(self) -> str:
        return reverse("shop:customer", args=[self.reference])


class TrialMembership(models.Model):
    """A trial of three days from the latest order. The customer becomes a member, or the trial expires."""

    class Status(models.TextChoices):
        RUNNING = "running"
        CONVERTED = "converted", "Member"
        EXPIRED = "expired"

    customer = models.OneToOneField(Customer, on_delete=models.CASCADE, related_name="trial")
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.RUNNING)
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    timeouts = TimeoutRelation()
    objects = ArmingManager["TrialMembership"]()

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="shop_trial_ended_unless_running",
                condition=Q(status="running", ended_at=None) | (~Q(status="running") & Q(ended_at__isnull=False)),
            )
        ]

    def __str__(self) -> str:
        return f"{self.customer}: {self.get_status_display()}"

    def begin(self, at: datetime) -> None:
        """Start the trial at `at`, whatever its status."""
        self.status, self.started_at, self.ended_at = self.Status.RUNNING, at, None
        self.save()

    def convert(self) -> None:
        """Make the customer a member."""
        self._end(self.Status.CONVERTED)

    def expire(self) -> None:
        """End the trial without a membership."""
        self._end(self.Status.EXPIRED)

    def _end(self, status: Status) -> None:
        self.status, self.ended_at = status, clock.now()
        self.save(update_fields=["status", "ended_at"])
