"""A verb that raises writes nothing, and the caller's transaction stays usable, also on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.testapp.models import Effect, Order, Parcel, Voucher

pytestmark = pytest.mark.django_db
Provoke = Callable[[Order], object]


def gone(order: Order) -> Order:
    lost = Order.objects.create(status="lost")
    Order.objects.filter(pk=lost.pk)._raw_delete("default")
    return lost


def passed(order: Order) -> None:
    dq.schedule_timeout(order, "remind", seconds=0)
    fire_due()
    with dq.before_deadline(order, "remind"):
        pass


def rows(order: Order) -> Any:
    return dq.pending_timeouts(order)


ERRORS: dict[str, tuple[type[Exception], Provoke]] = {
    "schedule, unknown policy": (dq.UnknownPolicy, lambda o: dq.schedule_timeout(o, "nonsense", hours=1)),
    "schedule, wrong unit": (dq.InvalidDelay, lambda o: dq.schedule_timeout(o, "remind", ours=1)),  # type: ignore[call-arg]
    "schedule, no deadline": (dq.InvalidDelay, lambda o: dq.schedule_timeout(o, "remind")),
    "schedule, too far": (dq.InvalidDelay, lambda o: dq.schedule_timeout(o, "remind", weeks=10**9)),
    "schedule, no float": (dq.InvalidDelay, lambda o: dq.schedule_timeout(o, "remind", weeks=10**400)),
    "schedule, payload": (dq.InvalidPayload, lambda o: dq.schedule_timeout(o, "remind", hours=1, payload=object())),
    "schedule, NUL": (dq.InvalidPayload, lambda o: dq.schedule_timeout(o, "remind", hours=1, payload={"a": "\0"})),
    "schedule, NaN": (dq.InvalidPayload, lambda o: dq.schedule_timeout(o, "remind", hours=1, payload=float("nan"))),
    "schedule, key": (ValueError, lambda o: dq.schedule_timeout(o, "remind", hours=1, key="k" * 201)),
    "schedule, key with NUL": (ValueError, lambda o: dq.schedule_timeout(o, "remind", hours=1, key="\0")),
    "schedule, conflict": (
        dq.TimeoutConflict,
        lambda o: dq.schedule_timeout(o, "remind", hours=2, key="there", on_conflict="error"),
    ),
    "schedule, unsaved": (ValueError, lambda o: dq.schedule_timeout(Order(), "remind", hours=1)),
    "schedule, gone": (ValueError, lambda o: dq.schedule_timeout(gone(o), "remind", hours=1)),
    "schedule, another model": (dq.UnknownPolicy, lambda o: dq.schedule_timeout(Parcel.objects.create(), "remind")),
    "schedule many, conflict": (
        dq.TimeoutConflict,
        lambda o: dq.schedule_timeouts([o], "remind", hours=2, key="there", on_conflict="error"),
    ),
    "schedule many, one gone": (ValueError, lambda o: dq.schedule_timeouts([o, gone(o)], "remind", hours=1)),
    "schedule many, mixed": (
        (TypeError, dq.UnknownPolicy),  # type: ignore[dict-item]
        lambda o: dq.schedule_timeouts([o, Voucher.objects.create(code="v")], "remind", hours=1),
    ),
    "cancel, unknown policy": (dq.UnknownPolicy, lambda o: dq.cancel_timeout(o, "nonsense")),
    "cancel, unsaved": (ValueError, lambda o: dq.cancel_timeout(Order(), "remind")),
    "cancel many, not timeouts": (TypeError, lambda o: dq.cancel_timeouts([o])),  # type: ignore[list-item]
    "extend, limit": (dq.ExtensionLimit, lambda o: dq.extend_timeout(o, "once", hours=1)),
    "extend, no span": (dq.InvalidDelay, lambda o: dq.extend_timeout(o, "remind")),
    "extend, too far": (dq.InvalidDelay, lambda o: dq.extend_timeout(o, "remind", key="there", weeks=420_000)),
    "extend many, too far": (dq.InvalidDelay, lambda o: dq.extend_timeouts(rows(o), weeks=420_000)),
    "reschedule, no delay": (dq.InvalidDelay, lambda o: dq.reschedule_timeout(o, "remind")),
    "reschedule, naive": (dq.InvalidDelay, lambda o: dq.reschedule_timeout(o, "remind", at=datetime(2030, 1, 1))),  # noqa: DTZ001
    "reschedule many, no delay": (dq.InvalidDelay, lambda o: dq.reschedule_timeouts(rows(o))),
    "guard, passed": (dq.DeadlinePassed, passed),
    "guard, gone": (Order.DoesNotExist, lambda o: dq.before_deadline(gone(o), "remind").__enter__()),
    "sync, unsaved": (ValueError, lambda o: dq.sync_timeouts([o, Order()])),
    "deadline, unknown policy": (dq.UnknownPolicy, lambda o: dq.get_deadline(o, "nonsense")),
    "explain, unsaved": (ValueError, lambda o: dq.explain_timeout(Order(), "remind")),
    "pending, bare name": (dq.UnknownPolicy, lambda o: dq.pending_timeouts(policy="remind")),
    "save, its since raises": (ZeroDivisionError, lambda o: o.save()),
}


@pytest.fixture
def order(declare: Callable[..., Any]) -> Order:
    def since(order: Order) -> datetime:
        raise ZeroDivisionError

    order = Order.objects.create(status="new")
    once = declare(Order, name="once", max_extensions=1)
    dq.schedule_timeout(order, once, hours=1)
    dq.extend_timeout(order, once, hours=1)
    dq.schedule_timeout(order, "remind", hours=1, key="there")
    declare(Order, name="raises", since=since, when=Q(status="new"), after=timedelta(hours=1))
    return order


@pytest.mark.parametrize("case", ERRORS)
def test_a_verb_that_raises_leaves_the_transaction_usable_and_the_ledger_as_it_was(order: Order, case: str) -> None:
    error, provoke = ERRORS[case]
    before = waiting()
    with transaction.atomic():
        try:
            provoke(order)
        except error:
            pass
        else:
            pytest.fail("nothing was raised")
        Effect.objects.create(what="usable", object_id=order.pk)
        assert dq.get_deadline(order, "remind", key="there") is not None
    assert Effect.objects.filter(what="usable").count() == 1
    assert waiting() == before


def waiting() -> list[Any]:
    """Return the pending rows, with every column that a verb may write."""
    columns = ("id", "slot", "due_at", "run_at", "extensions", "payload", "history", "reason", "idempotency_key")
    return list(Timeout.objects.filter(settled_at=None).order_by("id").values_list(*columns))
