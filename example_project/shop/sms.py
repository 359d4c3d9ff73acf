"""Send text messages through the gateway `SHOP_SMS_GATEWAY`, a dotted path.

A gateway is called at least once for each message, with the same key each time, and sends each key once. The gateway
below stores the key in a unique column; real providers accept it as a header.
"""

from __future__ import annotations

import logging
from typing import Protocol

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils.module_loading import import_string

from django_delayq import clock
from shop.models import Outage, TextMessage

logger = logging.getLogger(__name__)


class Gateway(Protocol):
    """The interface of a provider."""

    def send(self, recipient: str, text: str, *, key: str) -> None:
        """Send the message, once for each `key`."""


class LogGateway:
    """A gateway that sends nothing, but stores and logs the message. During an outage it fails."""

    def send(self, recipient: str, text: str, *, key: str) -> None:
        if Outage.objects.exists():
            raise ConnectionError("The SMS provider does not answer.")
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
