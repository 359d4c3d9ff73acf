"""The policy that sends messages: due at once, outside of a transaction, and repeated by `DELAYQ["RETRY"]`."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q

from django_delayq import GiveUp, timeout_policy
from django_delayq.contrib.webhooks import outbox
from django_delayq.contrib.webhooks.endpoints import get_endpoints
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.contrib.webhooks.sending import DeliveryFailed, Gone, send
from django_delayq.models import Timeout
from django_delayq.times import clock

outbox.connect()


@timeout_policy(
    Delivery, after=timedelta(0), since="created_at", when=Q(delivered_at=None), atomic=False, search="message_id"
)
def deliver(message: Delivery, timeout: Timeout) -> None:
    """Send the message to its endpoint, and note that it was accepted.

    An endpoint that this process does not know is a failed attempt: during a deployment, another worker knows it.
    """
    endpoint = get_endpoints().get(message.endpoint)
    if endpoint is None:
        raise DeliveryFailed(f"There is no endpoint {message.endpoint!r} in DELAYQ_WEBHOOKS.")
    try:
        send(endpoint, message.message_id, message.body)
    except Gone as error:
        raise GiveUp(str(error)) from None
    message.delivered_at = clock.now()
    message.save(update_fields=["delivered_at"])
