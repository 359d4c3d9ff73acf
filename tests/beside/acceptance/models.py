"""One model with a deadline."""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from django_delayq import TimeoutRelation


class Ticket(models.Model):
    status = models.CharField(max_length=10, default="open")
    opened_at = models.DateTimeField(default=timezone.now)
    timeouts = TimeoutRelation()
