"""A verb that raises names the reason, writes nothing, and leaves the transaction usable, also on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.ledger.controls import policy_state
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.testapp.models import Effect, Order, Parcel, Voucher

pytestmark = pytest.mark.django_db
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001
verbs: Any = dq
"""What is wrong in these calls is often their types."""
operate: Any = operations
Cases = dict[str, tuple[type[Exception], str | None, Callable[[Order], object]]]


def schedule(order: Any, policy: Any = "remind", **options: Any) -> object:
    return verbs.schedule_timeout(order, policy, **{"hours": 1, **options})


def schedule_many(*objects: Any, policy: str = "remind", **options: Any) -> object:
    return verbs.schedule_timeouts(objects, policy, **{"hours": 1, **options})


def delayed(order: Order, **delay: Any) -> object:
    return verbs.schedule_timeout(order, "remind", **delay)


def for_another(call: Callable[[Any], object], obj: Any, order: Order) -> object:
    return call(obj)


def gone(order: Order) -> Order:
    lost = Order.objects.create(status="lost")
    Order.objects.filter(pk=lost.pk)._raw_delete("default")
    return lost


def guard(order: Any, policy: str = "remind", **options: Any) -> None:
    with verbs.before_deadline(order, policy, **options):
        pytest.fail("the block ran")


def guard_too_late(order: Order) -> None:
    dq.schedule_timeout(order, "remind", seconds=0)
    fire_due()
    guard(order)


def rows(order: Order) -> Any:
    return dq.pending_timeouts(order)


def row(order: Order) -> Timeout:
    return dq.pending_timeouts(order, "remind", key="there").get()


DELAYS: list[dict[str, Any]] = [
    {}, {"minutes": -1}, {"minutes": "5"}, {"minutes": True}, {"minutes": float("nan")},
    {"minuts": 5}, {"minutes": 5, "at": NOON}, {"minutes": 5, "after": timedelta(1)}, {"after": timedelta(-1)},
    {"after": 5}, {"at": NAIVE}, {"at": "tomorrow"}, {"weeks": 10**9}, {"weeks": 10**400}, {"days": 365 * 100},
]  # fmt: skip
KEYS: dict[str, Any] = {"long": "k" * 201, "NUL": "\0", "surrogate": "\udcff", "number": 5, "None": None}
WITH_A_KEY: dict[str, Callable[..., object]] = {
    "schedule": lambda o, key: schedule(o, key=key),
    "schedule many": lambda o, key: schedule_many(o, key=key),
    "cancel": lambda o, key: verbs.cancel_timeout(o, "remind", key=key),
    "deadline": lambda o, key: verbs.get_deadline(o, "remind", key=key),
}
UNSAVED: dict[str, Callable[[Any], object]] = {
    "schedule": lambda obj: schedule(obj, policy=policy_of(obj)),
    "cancel": lambda obj: verbs.cancel_timeout(obj, policy_of(obj)),
    "extend": lambda obj: verbs.extend_timeout(obj, policy_of(obj), hours=1),
    "deadline": lambda obj: verbs.get_deadline(obj, policy_of(obj)),
    "explain": lambda obj: verbs.explain_timeout(obj, policy_of(obj)),
    "guard": lambda obj: guard(obj, policy_of(obj)),
}


def policy_of(obj: Any) -> str:
    return "expire" if isinstance(obj, Voucher) else "remind"


REFUSED: Cases = {
    **{
        f"delay {str(delay)[:40]}": (dq.InvalidDelay, None, partial(delayed, **delay))
        for delay in DELAYS
    },
    **{
        f"{verb}, key {name}": (ValueError, "key", partial(call, key=key))
        for verb, call in WITH_A_KEY.items()
        for name, key in KEYS.items()
    },
    **{
        f"{verb}, unsaved {type(obj).__name__}": (ValueError, "not saved", partial(for_another, call, obj))
        for verb, call in UNSAVED.items()
        for obj in (Order(), Voucher(code="has a key"))
    },
    "a key with NUL to read": (ValueError, "without NUL", lambda o: verbs.pending_timeouts(o, key="\0")),
    "too far for one of many": (dq.InvalidDelay, "too far", lambda o: schedule_many(o, days=900_000)),
    "a payload of a megabyte": (dq.InvalidPayload, "1000000", lambda o: schedule(o, payload="x" * 1_000_001)),
    "an object that is gone": (ValueError, "not in the database", lambda o: schedule(gone(o))),
    "one of many is gone": (ValueError, "not in the database", lambda o: schedule_many(o, gone(o))),
    "a guard of what is gone": (Order.DoesNotExist, None, lambda o: guard(gone(o))),
    "a guard that is too late": (dq.DeadlinePassed, None, guard_too_late),
    "a guard that is strict as a list": (TypeError, "strict is True or False", lambda o: guard(o, strict=[])),
    "two models": (dq.UnknownPolicy, "Voucher", lambda o: schedule_many(o, Voucher.objects.create(code="v"))),
    "pending, unsaved": (ValueError, "not saved", lambda o: verbs.pending_timeouts(Order())),
    "sync, unsaved": (ValueError, "bulk_create", lambda o: verbs.sync_timeouts([o, Order()])),
    "schedule, another model": (dq.UnknownPolicy, "Order", lambda o: schedule(Parcel.objects.create())),
    "guard, unknown": (dq.UnknownPolicy, "nonsense", lambda o: guard(o, "nonsense")),
    "pending, a bare name": (dq.UnknownPolicy, "label", lambda o: dq.pending_timeouts(policy="remind")),
    "state, a near label": (dq.UnknownPolicy, "Did you mean", lambda o: policy_state("testapp.order.remnd", "default")),
    "extend beyond the limit": (dq.ExtensionLimit, None, lambda o: dq.extend_timeout(o, "once", hours=1)),
    "extend too far": (dq.InvalidDelay, None, lambda o: dq.extend_timeout(row(o), weeks=420_000)),
    "reschedule to nothing": (dq.InvalidDelay, None, lambda o: dq.reschedule_timeout(row(o))),
    "a function of the policy raises": (ZeroDivisionError, None, lambda o: o.save()),
    "schedule a timeout": (TypeError, "not a Timeout.*use reschedule", lambda o: schedule(row(o))),
    "no delay for many": (dq.InvalidDelay, None, lambda o: verbs.schedule_timeouts([o], "remind")),
    "a payload of many": (dq.InvalidPayload, None, lambda o: schedule_many(o, payload=object())),
    "which policy": (TypeError, "Which policy of Order\\? Name one", lambda o: schedule(o, policy=None)),
    "extend by nothing": (dq.InvalidDelay, None, lambda o: dq.extend_timeout(row(o))),
    "extend many too far": (dq.InvalidDelay, None, lambda o: dq.extend_timeouts(rows(o), weeks=420_000)),
    "reschedule to a naive time": (dq.InvalidDelay, None, lambda o: dq.reschedule_timeout(row(o), at=NAIVE)),
    "reschedule many to nothing": (dq.InvalidDelay, None, lambda o: dq.reschedule_timeouts(rows(o))),
    "snooze by no number": (dq.InvalidDelay, None, lambda o: verbs.Snooze(minutes="5")),
    "cancel many objects": (TypeError, "not Order queryset", lambda o: verbs.cancel_timeouts(Order.objects.all())),
    "operate on an unsaved timeout": (ValueError, "not a row", lambda o: operate.cancel([Timeout()], by="x")),
    "pending of a class": (TypeError, "not the class int", lambda o: verbs.pending_timeouts(int)),
    "set the clock to a naive time": (ValueError, "aware", lambda o: clock.set_to(NAIVE).__enter__()),
    "cancel a class": (TypeError, "not the class Order", lambda o: verbs.cancel_timeout(Order, "remind")),
    "cancel many of a class": (TypeError, "Expected timeouts.*not Order", lambda o: verbs.cancel_timeouts(Order)),
    "cancel a list of objects": (TypeError, "Expected timeouts.*not Order", lambda o: verbs.cancel_timeouts([o])),
    "operate on an object": (TypeError, "Expected timeouts.*not Order", lambda o: operate.cancel(o, by="x")),
    "cancel an unsaved timeout": (ValueError, "not a row of the ledger", lambda o: verbs.cancel_timeouts(Timeout())),
    "sync a class": (TypeError, "Pass Order", lambda o: verbs.sync_timeouts(Order)),
    "a timeout, and another policy": (ValueError, "not a timeout of", lambda o: dq.cancel_timeout(row(o), "linger")),
    "pending of a number": (TypeError, "not 7", lambda o: verbs.pending_timeouts(7)),
}  # fmt: skip


@pytest.fixture
def order(declare: Callable[..., Any]) -> Order:
    """One with a pending timeout, one that was extended as often as it may be, and one that saving cannot compute."""

    def since(order: Order) -> datetime:
        raise ZeroDivisionError

    order = Order.objects.create(status="new")
    once = declare(Order, name="once", max_extensions=1)
    dq.schedule_timeout(order, once, hours=1)
    dq.extend_timeout(order, once, hours=1)
    dq.schedule_timeout(order, "remind", hours=1, key="there")
    declare(Order, name="raises", since=since, when=Q(status="new"), after=timedelta(hours=1))
    return order


def waiting() -> list[Any]:
    """Return the pending rows, with every column that a verb may write."""
    columns = ("id", "slot", "due_at", "run_at", "extensions", "payload", "history", "reason", "idempotency_key")
    return list(Timeout.objects.filter(settled_at=None).order_by("id").values_list(*columns))


@pytest.mark.parametrize("case", REFUSED)
def test_a_verb_that_raises_leaves_the_transaction_usable_and_the_ledger_as_it_was(order: Order, case: str) -> None:
    error, words, call = REFUSED[case]
    before = waiting()
    with transaction.atomic():
        with pytest.raises(error, match=words):
            call(order)
        Effect.objects.create(what="usable", object_id=order.pk)
        assert dq.get_deadline(order, "remind", key="there") is not None
    assert Effect.objects.filter(what="usable").count() == 1
    assert waiting() == before
