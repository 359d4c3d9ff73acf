"""Sent text messages."""

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
