"""Days since one datetime, and the policy of an invoice with steps and a grace."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Q

from django_delayq import TimeoutPolicy, clock
from django_delayq.models import Timeout
from tests.testapp.models import Effect, Order

Declare = Callable[..., TimeoutPolicy[Any]]
DAY = timedelta(days=1)
T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)
ARMED: dict[str, Any] = {"since": "created_at", "when": Q(status="unpaid")}


def at(days: float) -> Any:
    """Set the clock to so many days after `T0`."""
    return clock.set_to(T0 + days * DAY)


def days(moment: datetime | None) -> float:
    """Return how many days after `T0` a datetime is."""
    assert moment is not None
    return round((moment - T0) / DAY, 6)


def note(obj: Any, timeout: Timeout) -> None:
    """Write which step was called, and with which idempotency key."""
    name = timeout.step or "handler"
    Effect.objects.create(
        what=name, object_id=str(obj.pk), timeout_id=timeout.pk, idempotency_key=timeout.idempotency_key
    )


def ran() -> list[str]:
    """Return which steps and handlers have run, in order."""
    return list(Effect.objects.order_by("id").values_list("what", flat=True))


def dunning(declare: Declare, **options: Any) -> TimeoutPolicy[Any]:
    """Declare a policy that acts on day 17: a friendly reminder on day 11, firm ones on days 14 to 16."""
    atomic = options.pop("atomic_steps", True)
    given = {"name": "collect", "after": 14 * DAY, "grace": 3 * DAY, **ARMED, **options}
    policy = declare(Order, note, **given)
    policy.step(-3 * DAY, atomic=atomic, name="friendly")(note)
    policy.step(timedelta(0), every=DAY, times=3, atomic=atomic, name="firm")(note)
    return policy


def sent(day: float = 0) -> Order:
    """Create an invoice that was sent on this day."""
    return Order.objects.create(status="unpaid", created_at=T0 + day * DAY)


def row_of(order: Any) -> Timeout:
    """Return the newest timeout of `order`, without that of the policy that the test app declares."""
    rows = Timeout.objects.filter(object_id=str(order.pk)).exclude(policy="testapp.order.cancel_unpaid")
    return rows.order_by("-id")[0]


def planned(order: Any) -> tuple[str, float, float]:
    """Return the next step of the timeout of `order`, when it runs, and the deadline."""
    row = row_of(order)
    return row.step, days(row.run_at), days(row.due_at)
