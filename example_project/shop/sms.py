"""Text messages through a gateway that `SHOP_SMS_GATEWAY` names by its dotted path.

A gateway is called at least once for each message, and with the same key each time. The key is what makes
it once: the one here keeps it in a unique column, a real provider takes it as a header.
"""

from __future__ import annotations

import logging
from typing import Protocol

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils.module_loading import import_string

from django_delayq import clock
from shop.models import TextMessage

logger = logging.getLogger(__name__)


class Gateway(Protocol):
    """What the shop needs of a provider."""

    def send(self, recipient: str, text: str, *, key: str) -> None:
        """The message is on its way, once, however often this is called with the same `key`."""


class LogGateway:
    """Sends nothing anywhere: a row and a log line show that it would have."""

    def send(self, recipient: str, text: str, *, key: str) -> None:
        try:
            with transaction.atomic():
                TextMessage.objects.create(idempotency_key=key, recipient=recipient, text=text, sent_at=clock.now())
        except IntegrityError:
            logger.info("SMS %s was sent before.", key)
        else:
            logger.info("SMS to %s: %s", recipient, text)


def send_sms(recipient: str, text: str, *, key: str) -> None:
    """Send through the configured gateway."""
    gateway: Gateway = import_string(settings.SHOP_SMS_GATEWAY)()
    gateway.send(recipient, text, key=key)
