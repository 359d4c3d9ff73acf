"""The outbox: one row for each message to an endpoint."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any, ClassVar

from django.db import models
from django.db.models import Field
from django.utils.translation import gettext_lazy as _

from django_delayq import ArmingManager, TimeoutRelation


def new_message_id() -> str:
    """Return an id that no other message has: the receiver recognizes a repetition by it."""
    return f"msg_{uuid.uuid4().hex}"


class Delivery(models.Model):
    """A message to one endpoint. It is kept as long as its timeout, which has the history of its attempts."""

    message_id: Field[str, str] = models.CharField(
        _("message id"), max_length=40, unique=True, default=new_message_id, editable=False
    )
    endpoint: Field[str, str] = models.CharField(_("endpoint"), max_length=100)
    """Its name in `DELAYQ_WEBHOOKS`, which has the URL and the secret: neither is stored."""
    event: Field[str, str] = models.CharField(_("event"), max_length=20)
    policy: Field[str, str] = models.CharField(_("policy"), max_length=200)
    body: Field[str, str] = models.TextField(_("body"))
    """JSON in ASCII, which each database can store, and each attempt signs as it is."""
    timeout_id: Field[int | None, int | None] = models.BigIntegerField(null=True, db_index=True, editable=False)
    """The row that `body` shows as `data`; None: it is about a policy."""
    created_at: Field[datetime, datetime] = models.DateTimeField(_("created at"), db_index=True)
    delivered_at: Field[datetime | None, datetime | None] = models.DateTimeField(
        _("delivered at"), null=True, blank=True, default=None
    )

    timeouts = TimeoutRelation()
    objects: ClassVar[Any] = ArmingManager()

    class Meta:
        verbose_name = _("webhook message")
        verbose_name_plural = _("webhook messages")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.message_id
