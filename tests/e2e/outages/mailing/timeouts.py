"""The policy of a worker process. The test declares it, too, to read what the ledger has of it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from django.core.mail import get_connection, send_mail

from django_delayq import Retry, timeout_policy
from tests.testapp.models import Order

OPTIONS: Any = {"name": "notify", "search": "note", "retry": Retry([timedelta(milliseconds=200)] * 1000)}
"""A ladder of seconds instead of a day, without an end within the test."""


def notify(order: Order, timeout: Any) -> None:
    """Mail the customer."""
    backend = "django.core.mail.backends.smtp.EmailBackend"
    port = int(os.environ["DELAYQ_TEST_SMTP_PORT"])
    with get_connection(backend, host="127.0.0.1", port=port, timeout=10) as connection:
        send_mail("Pay", f"Order {order.note}", "shop@example.com", ["you@example.com"], connection=connection)


if "DELAYQ_TEST_SMTP_PORT" in os.environ:
    timeout_policy(Order, **OPTIONS)(notify)
