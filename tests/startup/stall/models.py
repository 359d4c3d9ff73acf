"""One model. Its policy is in `timeouts`, which only django_delayq imports."""

from __future__ import annotations

from django.db import models


class Booking(models.Model):
    status = models.CharField(max_length=20, default="open")
    created_at = models.DateTimeField(null=True)
