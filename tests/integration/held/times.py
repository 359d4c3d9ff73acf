"""Hours since one datetime, in which these tests count."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from django_delayq import TimeoutPolicy, clock
from django_delayq.models import Timeout

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
