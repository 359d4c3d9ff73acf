"""Hours since one datetime, in which these tests count, and what they do to an order and see of its timeout."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

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
