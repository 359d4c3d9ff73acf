"""Sent text messages, and the outages in which none can be sent."""

from __future__ import annotations

from django.db import models


class TextMessage(models.Model):
    """One sent message. Its unique key prevents sending it twice."""

    idempotency_key = models.CharField(max_length=100, unique=True)
    recipient = models.CharField(max_length=30)
    text = models.TextField()
    sent_at = models.DateTimeField()

    class Meta:
        ordering = ["-sent_at", "-id"]

    def __str__(self) -> str:
        return f"{self.recipient}: {self.text}"


class Outage(models.Model):
    """While there is one, the SMS provider does not answer. A visitor of the front page begins and ends it."""

    began_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"since {self.began_at}"
