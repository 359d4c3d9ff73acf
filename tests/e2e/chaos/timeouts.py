"""Policies of the chaos, beside those of the tests' app (`cancel_unpaid`, `remind`, `send_outside`)."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django_delayq import timeout_policy
from tests.testapp.models import Effect, Order

if TYPE_CHECKING:
    from django_delayq.models import Timeout


@timeout_policy(Order, batch=20)
def gather(orders: Any, timeouts: list[Timeout]) -> None:
    """Many at once, in one transaction."""
    Effect.objects.bulk_create(
        Effect(what="gather", object_id=timeout.object_id, timeout_id=timeout.pk) for timeout in timeouts
    )


@timeout_policy(Order)
def falter(order: Order, timeout: Timeout) -> None:
    """Fail as often as the payload requires, each time after the effect, which must be rolled back."""
    Effect.objects.create(what="falter", object_id=order.pk, timeout_id=timeout.pk)
    if timeout.payload and timeout.attempts <= timeout.payload["failures"]:
        raise RuntimeError("not yet")


@timeout_policy(Order)
def chill(order: Order, timeout: Timeout) -> None:
    """Scheduled by hand; operators hold it and release it."""
    Effect.objects.create(what="chill", object_id=order.pk, timeout_id=timeout.pk)


@timeout_policy(Order, after=timedelta(seconds=2))
def decay(order: Order, timeout: Timeout) -> None:
    """Scheduled with the delay in force, which operators change."""
    Effect.objects.create(what="decay", object_id=order.pk, timeout_id=timeout.pk)
