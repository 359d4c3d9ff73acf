"""What the tests of `batch_by` share: a handler that notes its calls, and works. See `shops`, `calls` and `policy`."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from django_delayq import TimeoutPolicy, schedule_timeouts
from django_delayq.firing import Report, plan, run
from django_delayq.models import Timeout
from tests.testapp.market import Channel, Purchase

Policy = TimeoutPolicy[Any]
Shops = list[Channel]


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


def due_of(policy: Policy, shop: Channel | None, count: int = 1, **delay: Any) -> list[Timeout]:
    """So many due timeouts of a shop, in due order."""
    purchases = [Purchase.objects.create(channel=shop) for _ in range(count)]
    schedule_timeouts(purchases, policy, **(delay or {"seconds": 0}))
    rows = Timeout.objects.filter(object_id__in=[str(purchase.pk) for purchase in purchases])
    return list(rows.order_by("run_at", "id"))


def run_of(*rows: Timeout) -> Report:
    [work], _ = plan({row.pk: 1 for row in rows}, "default")
    return run(work, "default")
