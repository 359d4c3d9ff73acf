"""Policies of the chaos, beside those of the tests' app (`cancel_unpaid`, `remind`, `send_outside`)."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django_delayq import Brake, Limits, Rate, timeout_policy
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


@timeout_policy(Order, name="chill")
@timeout_policy(Order, name="decay", after=timedelta(seconds=2))
@timeout_policy(Order, name="ghost")
@timeout_policy(Order, name="rush", brake=Brake(4, per=timedelta(seconds=10)))
def act(order: Order, timeout: Timeout) -> None:
    """Operators hold it and release it, change its delay, have it in shadow mode at times; its brake pauses it."""
    Effect.objects.create(what=timeout.policy.rpartition(".")[2], object_id=order.pk, timeout_id=timeout.pk)


# A slot that a worker misses by more than a sixteenth of the period is lost, so the period is long: all cores are busy.
@timeout_policy(Order, limits=Limits(run=timedelta(seconds=0.5), rate=Rate(200, per=timedelta(seconds=5))))
def overrun(order: Order, timeout: Timeout) -> None:
    """Run too long as often as the payload requires, each time after the effect, which must be rolled back."""
    Effect.objects.create(what="overrun", object_id=order.pk, timeout_id=timeout.pk)
    if timeout.payload and timeout.attempts <= timeout.payload["overruns"]:
        time.sleep(2)
