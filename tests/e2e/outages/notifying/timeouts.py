"""The policy of a worker process. The test declares it, too, to read what the ledger has of it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from django_delayq import Retry, timeout_policy
from tests.testapp.models import Order

OPTIONS: Any = {"name": "notify", "search": "note", "retry": Retry([timedelta(milliseconds=200)] * 1000)}
"""A ladder of seconds instead of a day, without an end within the test."""


def notify(order: Order, timeout: Any) -> None:
    """Connect to the other service."""
    socket.create_connection(("127.0.0.1", int(os.environ["DELAYQ_TEST_SERVICE_PORT"])), timeout=10).close()


if "DELAYQ_TEST_SERVICE_PORT" in os.environ:
    timeout_policy(Order, **OPTIONS)(notify)
