"""Hours since one datetime, what tests do to an order and see of its timeout, and a policy with `hold_when`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import TimeoutPolicy, clock
from django_delayq.arming.sync import automatic_policies, sync_policy
from django_delayq.models import Timeout
from tests.testapp.models import Order

Declare = Callable[..., TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)
T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)


def at(hours: float) -> Any:
    """Set the clock to so many hours after `T0`."""
    return clock.set_to(T0 + hours * HOUR)


def hours(moment: datetime | None) -> float:
    """Return how many hours after `T0` a datetime is."""
    assert moment is not None
    return (moment - T0) / HOUR


def again(row: Timeout) -> Timeout:
    """Return the row as it is in the database."""
    return Timeout.objects.get(pk=row.pk)


def seen(row: Timeout) -> str:
    """Return "held" with the hours that are left, "pending" or "paused" with the deadline, or how it was settled."""
    if row.state == "pending" or row.is_paused:
        return f"{'paused' if row.is_paused else row.state} {hours(row.due_at):g}"
    return row.state if row.remaining is None else f"{row.state} {row.remaining / HOUR:g}"


def save(order: Order, **values: Any) -> None:
    """Save other values of an order, and nothing else."""
    for name, value in values.items():
        setattr(order, name, value)
    order.save(update_fields=list(values))


def update_and_sync(order: Order, **values: Any) -> None:
    """Write other values as SQL would, and sync them."""
    Order.objects.filter(pk=order.pk).update(**values)
    dq.sync_timeouts(order)


def update_and_wait(order: Order, **values: Any) -> None:
    """Write other values as SQL would, and compare the tables, as a worker does."""
    Order.objects.filter(pk=order.pk).update(**values)
    for policy in automatic_policies("default"):
        sync_policy(policy, "default")


TALKS = Q(note="talks")
POLICIES: dict[str, dict[str, Any]] = {
    "column": {},
    "function": {"since": lambda order: order.created_at},
    "function after": {"after": lambda order: 4 * HOUR},
    "related": {"hold_when": TALKS & (Q(customer=None) | Q(customer__name="any"))},
}


@pytest.fixture(name="policy", params=POLICIES)
def talking(request: pytest.FixtureRequest, declare: Declare) -> dq.TimeoutPolicy[Any]:
    """A policy of four hours, with a `hold_when`."""
    options: dict[str, Any] = {"after": 4 * HOUR, "since": "created_at", "when": Q(status="unpaid"), "hold_when": TALKS}
    return declare(Order, name="talking", **options | POLICIES[request.param])
