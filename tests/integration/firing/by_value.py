"""What the tests of `batch_by` share: shops, a handler that notes its calls, and works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import QuerySet

from django_delayq import TimeoutPolicy, schedule_timeouts
from django_delayq.firing import Report, Work, plan, run
from django_delayq.models import Timeout
from tests.testapp.market import Channel, Merchant, Purchase

Declare = Callable[..., TimeoutPolicy[Any]]
FIRED = ("fired", "due")


@pytest.fixture
def shops() -> list[Channel]:
    return Channel.objects.bulk_create(Channel(merchant=Merchant.objects.create(name=name)) for name in "ABC")


class Calls:
    """A handler that notes each call: the shop of each object."""

    def __init__(self) -> None:
        self.all: list[list[int | None]] = []

    def __call__(self, purchases: QuerySet[Purchase], timeouts: list[Timeout]) -> None:
        assert [str(purchase.pk) for purchase in purchases] == [timeout.object_id for timeout in timeouts]
        self.all.append([purchase.channel_id for purchase in purchases])

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.all]

    def of_one_value(self) -> bool:
        return all(len(set(call)) == 1 for call in self.all)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def due_of(policy: TimeoutPolicy[Any], shop: Channel | None, count: int = 1, **delay: Any) -> list[Timeout]:
    """So many due timeouts of a shop, in due order."""
    purchases = [Purchase.objects.create(channel=shop) for _ in range(count)]
    schedule_timeouts(purchases, policy, **(delay or {"seconds": 0}))
    rows = Timeout.objects.filter(object_id__in=[str(purchase.pk) for purchase in purchases])
    return list(rows.order_by("run_at", "id"))


def work_of(*rows: Timeout) -> Work:
    [work], _ = plan({row.pk: 1 for row in rows}, "default")
    return work


def run_of(*rows: Timeout) -> Report:
    return run(work_of(*rows), "default")
