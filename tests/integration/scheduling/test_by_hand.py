"""Schedule, cancel, reschedule and extend by hand (DESIGN 3.2), in autocommit and in transactions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.models import Timeout
from tests.integration.operations.conftest import as_if
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_a_scheduled_timeout_waits_as_a_row_with_its_deadline(order: Order) -> None:
    with clock.set_to(NOON):
        row = dq.schedule_timeout(order, "remind", minutes=30, payload={"a": [1, None]}, reason="on request")
    row.refresh_from_db()
    assert (row.state, row.due_at, row.run_at, row.first_due_at) == ("pending", *[NOON + timedelta(minutes=30)] * 3)
    assert (row.policy, row.payload, row.reason) == ("testapp.order.remind", {"a": [1, None]}, "on request")
    assert row.content_object == order
    Order.objects.filter(pk=order.pk).update(created_at=NOON)
    row = dq.schedule_timeout(order, "cancel_unpaid")
    assert (row.due_at, row.since_at) == (NOON + timedelta(minutes=30), NOON), "without a delay the policy decides"


@pytest.mark.parametrize(
    ("delay", "length"),
    [
        ({"weeks": 1, "days": 1}, timedelta(days=8)),
        ({"hours": 0.5, "minutes": 1, "seconds": 2}, timedelta(seconds=1862)),
        ({"after": timedelta(minutes=3)}, timedelta(minutes=3)),
        ({"at": NOON + timedelta(days=2)}, timedelta(days=2)),
        ({"at": NOON - timedelta(days=2)}, timedelta(0)),
        ({"seconds": 0}, timedelta(0)),
    ],
)
def test_the_delay_grammar_names_the_deadline(order: Order, delay: dict[str, Any], length: timedelta) -> None:
    with clock.set_to(NOON):
        assert dq.schedule_timeout(order, "remind", **delay).due_at == NOON + length


def test_scheduling_again_replaces_the_pending_round_but_keeps_its_first_deadline_and_extensions(order: Order) -> None:
    first = dq.schedule_timeout(order, "remind", minutes=1, payload=1, reason="old")
    Timeout.objects.update(attempts=3, extensions=2, history=[{"what": "failed", "at": "2026-01-01T00:00:00Z"}])
    again = dq.schedule_timeout(order, "remind", hours=1, payload=2)
    row = Timeout.objects.get()
    assert row.pk == first.pk == again.pk
    assert (row.payload, row.attempts, row.extensions, row.history, row.reason) == (2, 0, 2, [], "")
    assert row.first_due_at == first.first_due_at
    assert next(iter(dq.explain_timeout(row))).details == {"to": row.due_at}
    assert row.idempotency_key != first.idempotency_key
    assert row.due_at == again.due_at > first.due_at


@pytest.mark.parametrize("in_bulk", [False, True])
def test_replacing_does_not_give_back_extensions_that_are_used_up(
    order: Order, declare: Callable[..., Any], in_bulk: bool
) -> None:
    declare(Order, name="cart", max_extensions=2)
    first = dq.schedule_timeout(order, "cart", minutes=10)
    for _ in range(2):
        dq.extend_timeout(order, "cart", minutes=10)
        if in_bulk:
            dq.schedule_timeouts([order], "cart", minutes=10)
        else:
            dq.schedule_timeout(order, "cart", minutes=10)
    with transaction.atomic(), pytest.raises(dq.ExtensionLimit, match="max_extensions=2 is used up") as limit:
        dq.extend_timeout(order, "cart", minutes=10)
    assert dq.extend_timeouts(dq.pending_timeouts(order), minutes=10) == 0
    row = Timeout.objects.get()
    assert (row.first_due_at, row.due_at) == (first.first_due_at, limit.value.timeout.due_at)


def test_on_conflict_keeps_or_refuses_what_is_pending_and_schedules_otherwise(order: Order) -> None:
    first = dq.schedule_timeout(order, "remind", minutes=1, payload=1, on_conflict="error")
    kept = dq.schedule_timeout(order, "remind", hours=1, payload=2, on_conflict="keep")
    assert (kept.pk, kept.due_at, kept.payload) == (first.pk, Timeout.objects.get().due_at, 1)
    with pytest.raises(dq.TimeoutConflict) as conflict:
        dq.schedule_timeout(order, "remind", hours=1, on_conflict="error")
    assert conflict.value.timeout == first


def test_keys_are_slots_of_their_own_case_and_all(order: Order) -> None:
    rows = [dq.schedule_timeout(order, "remind", minutes=1, key=key) for key in ("", "a", "A", "ä", "a ")]
    assert len({row.pk for row in rows}) == 5
    assert dq.cancel_timeout(order, "remind", key="A")
    assert set(dq.pending_timeouts(order).values_list("key", flat=True)) == {"", "a", "ä", "a "}


def test_cancel_says_true_and_keeps_cause_and_reason(order: Order) -> None:
    dq.schedule_timeout(order, "remind", minutes=1)
    assert dq.cancel_timeout(order, "remind", reason="paid by phone") is True
    assert dq.cancel_timeout(order, "remind") is True  # again, and nothing changes
    row = Timeout.objects.get()
    assert (row.state, row.cause, row.reason, row.is_settled) == ("cancelled", "hand", "paid by phone", True)
    assert dq.cancel_timeout(order, "remind", key="never armed") is True


@pytest.mark.parametrize(
    ("state", "cause", "answer", "ends"),
    [
        ("fired", "due", False, ("fired", "due", False)),
        ("firing", "", False, ("firing", "", True)),
        ("dead", "retries", True, ("cancelled", "hand", False)),
    ],
)
def test_cancel_says_whether_it_was_in_time(order: Order, state: str, cause: str, answer: bool, ends: object) -> None:
    """What fires gets no further attempt, and what is dead is buried."""
    row = as_if(dq.schedule_timeout(order, "remind", minutes=1), state, cause)
    assert dq.cancel_timeout(order, "remind") is answer
    row.refresh_from_db()
    assert (row.state, row.cause, row.final_attempt) == ends
    if state == "firing":
        assert dq.schedule_timeout(order, "remind", minutes=1) != row, "the next round"
        assert dq.cancel_timeout(order, "remind") is True


def test_reschedule_and_extend_move_the_pending_one_and_tell_its_history(order: Order) -> None:
    assert dq.reschedule_timeout(order, "remind", minutes=1) is None
    assert dq.extend_timeout(order, "remind", minutes=1) is None
    with clock.set_to(NOON):
        first = dq.schedule_timeout(order, "remind", minutes=1)
        dq.reschedule_timeout(order, "remind", hours=2, reason="holiday")
        moved = Timeout.objects.get()
        extended = dq.extend_timeout(order, "remind", minutes=5)
    assert (moved.pk, moved.due_at, moved.run_at) == (first.pk, NOON + timedelta(hours=2), NOON + timedelta(hours=2))
    assert (moved.first_due_at, moved.extensions) == (first.due_at, 0), "only `extend_timeout` extends"
    assert [(event["what"], event["reason"]) for event in moved.history] == [("rescheduled", "holiday")]
    assert extended is not None
    assert (extended.due_at, extended.extensions) == (NOON + timedelta(minutes=125), 1)


Declare = Callable[..., dq.TimeoutPolicy[Any]]
# `Limits(total=...)`: how far the application may move a deadline from its first one, by whichever verb.
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    return declare(Order, name="bounded", limits=dq.Limits(total=2 * HOUR))


@pytest.fixture
def now() -> datetime:
    return timezone.now()


VERBS: dict[str, Callable[[Order, Any, datetime], Any]] = {
    "schedule": lambda order, policy, at: dq.schedule_timeout(order, policy, at=at),
    "async": lambda order, policy, at: async_to_sync(dq.aschedule_timeout)(order, policy, at=at),
    "schedule many": lambda order, policy, at: dq.schedule_timeouts([order], policy, at=at),
    "many, once": lambda order, policy, at: dq.schedule_timeouts([order], policy, at=at, on_conflict="once"),
    "reschedule": lambda order, policy, at: dq.reschedule_timeout(order, policy, at=at),
    "extend": lambda order, policy, at: dq.extend_timeout(
        order, policy, after=at - (dq.get_deadline(order, policy) or at)
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_moves_a_deadline_up_to_the_total_and_not_beyond(
    order: Order, policy: dq.TimeoutPolicy[Any], now: datetime, verb: str
) -> None:
    first = dq.schedule_timeout(order, policy, at=now + HOUR)
    for _ in range(2):
        VERBS[verb](order, policy, now + 3 * HOUR)
    before = Timeout.objects.get()
    assert (before.first_due_at, before.due_at) == (first.due_at, now + 3 * HOUR)
    with transaction.atomic():
        with pytest.raises(dq.ExtensionLimit, match=r"Limits\(total=2 h\)") as refused:
            VERBS[verb](order, policy, now + 3 * HOUR + MINUTE)
        assert refused.value.timeout == before
        assert Timeout.objects.filter(pk=before.pk, due_at=before.due_at, history=before.history).exists()
    VERBS["reschedule"](order, policy, now + HOUR)
    VERBS[verb](order, policy, now + 2 * HOUR)


def test_of_many_those_at_their_limit_are_left_alone_or_refuse_all_that_are_scheduled_with_them(
    policy: dq.TimeoutPolicy[Any], now: datetime
) -> None:
    orders = [Order.objects.create(status="new") for _ in range(3)]
    dq.schedule_timeout(orders[0], policy, at=now + HOUR)
    with pytest.raises(dq.ExtensionLimit):
        dq.schedule_timeouts(orders, policy, at=now + 4 * HOUR)
    assert Timeout.objects.count() == 1
    assert dq.schedule_timeouts(orders, policy, at=now + HOUR, on_conflict="keep") == 2
    dq.extend_timeout(orders[0], policy, hours=2)
    rows = dq.pending_timeouts(Order, policy)
    assert dq.extend_timeouts(rows, minutes=90) == 2
    assert dq.reschedule_timeouts(rows, at=now + 4 * HOUR) == 0
    assert dq.reschedule_timeouts(rows, at=now + 2.75 * HOUR) == 3, "one of them is moved earlier"


def test_operators_and_new_values_of_since_are_not_limited(order: Order, declare: Declare, now: datetime) -> None:
    policy = declare(
        Order, name="bounded", after=HOUR, since="paid_at", when=Q(status="unpaid"), limits=dq.Limits(total=HOUR)
    )
    order.paid_at = now
    order.save()
    rows = dq.pending_timeouts(order, policy)
    assert operations.postpone(rows, by="ana", reason="call", hours=5).changed == 1
    with pytest.raises(dq.ExtensionLimit):
        dq.extend_timeout(order, policy, minutes=1)
    order.paid_at = now + 20 * HOUR
    order.save()
    row = rows.get()
    assert (row.first_due_at, row.due_at) == (now + 21 * HOUR, now + 21 * HOUR)
    assert dq.extend_timeout(order, policy, hours=1)
