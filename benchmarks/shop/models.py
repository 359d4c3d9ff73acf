"""Business rows. All tables have the same columns; they differ in the policies that `timeouts` declares for them."""

from __future__ import annotations

from django.db import models


class _Row(models.Model):
    status = models.CharField(max_length=20, default="unpaid")
    created_at = models.DateTimeField(null=True)
    note = models.CharField(max_length=50, default="")

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self._meta.model_name} {self.pk}"


class Order(_Row):
    """Has one automatic policy, as in the README: cancelled if it is not paid in time."""


class Invoice(_Row):
    """Has policies with that condition that are scheduled by hand, so that saving it costs each contestant the same."""


class Ticket(_Row):
    """Has one automatic policy like that of `Order`, with a deadline in office hours."""


class Task(_Row):
    """Has policies without a condition that are scheduled by hand, and do nothing."""


class Plain(_Row):
    """Has no policy."""
