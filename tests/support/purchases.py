"""Purchases of a channel, and a clock that is stopped at noon: for deadlines and conditions that are data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db.models import Q

from django_delayq import TimeoutPolicy, clock
from django_delayq.models import Timeout
from tests.testapp.market import Channel, Merchant, Purchase

Declare = Callable[..., TimeoutPolicy[Any]]
MINUTE = timedelta(minutes=1)
UNPAID: dict[str, Any] = {"since": "created_at", "when": Q(status="unpaid")}


def at(minutes: float = 0) -> datetime:
    """So many minutes after noon, as `USE_TZ` has datetimes."""
    moment = datetime(2026, 6, 1, 12, tzinfo=UTC) + minutes * MINUTE
    return moment if settings.USE_TZ else clock.fitting(moment)


@pytest.fixture(autouse=True)
def noon() -> Iterator[None]:
    with clock.set_to(at()):
        yield


@pytest.fixture(name="channel")
def its_channel() -> Channel:
    return Channel.objects.create(merchant=Merchant.objects.create(), pay_within=30 * MINUTE)


def bought(**values: Any) -> Purchase:
    return Purchase.objects.create(**{"created_at": at(), **values})


def due(obj: Purchase) -> list[float]:
    """The deadlines of the waiting timeouts of `obj`, in minutes after noon."""
    rows = Timeout.objects.waiting().filter(object_id=str(obj.pk)).order_by("due_at")
    return [(row.due_at - at()) / MINUTE for row in rows]


def only_row() -> Timeout:
    row: Timeout = Timeout.objects.get()
    return row
