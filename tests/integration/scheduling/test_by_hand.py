"""Schedule, cancel, reschedule and extend one timeout by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.arming.sync import TableSync
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.operations.conftest import as_if
from tests.support.seen import heard, sql_of
from tests.support.typed import Declare
from tests.support.workers import states_in_order as states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
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


def test_replacing_does_not_give_back_extensions_that_are_used_up(order: Order, declare: Declare) -> None:
    declare(Order, name="cart", max_extensions=2)
    first = dq.schedule_timeout(order, "cart", minutes=10)
    for replace in (
        dq.schedule_timeout,
        lambda order, *policy, **delay: dq.schedule_timeouts([order], *policy, **delay),
    ):
        dq.extend_timeout(order, "cart", minutes=10)
        replace(order, "cart", minutes=10)
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


# `Limits(total=...)`: how far the application may move a deadline from its first one, by whichever verb.


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


# What `cancel_timeout` closes: the round of the present `since`, though not armed yet, or one that was retried.
CLOSED = ("cancelled", "hand", "the customer called")


@pytest.fixture
def unarmed() -> Order:
    """An order that is not armed yet, as after `bulk_create`, or if a process died between save and arming."""
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
    return Order.objects.get()


@pytest.mark.parametrize("how", ["save", "sync"])
def test_what_was_cancelled_before_it_was_armed_is_not_armed(unarmed: Order, how: str) -> None:
    assert dq.cancel_timeout(unarmed, "cancel_unpaid", reason="the customer called") is True
    before = vars(unarmed.timeouts.get()) | {"_state": None}
    sent = sql_of(lambda: dq.cancel_timeout(unarmed, "cancel_unpaid", reason="again"))
    assert not [sql for sql in sent if sql.startswith("INSERT")]
    if how == "save":
        unarmed.save()
    else:
        TableSync("default").run(at_once=True)
    row, since = unarmed.timeouts.get(), unarmed.created_at
    assert vars(row) | {"_state": None} == before
    assert (row.state, row.cause, row.reason) == CLOSED
    assert (row.since_at, row.due_at) == (since, since + 30 * MINUTE)  # type: ignore[operator]


def test_a_round_that_is_cancelled_while_its_condition_does_not_hold_keeps_its_deadlines(unarmed: Order) -> None:
    unarmed.save()
    dq.extend_timeout(unarmed, "cancel_unpaid", hours=1)
    unarmed.status = "paying"
    unarmed.save()
    ended = unarmed.timeouts.get()
    assert dq.cancel_timeout(unarmed, "cancel_unpaid") is True
    row = unarmed.timeouts.latest("id")
    assert (row.pk > ended.pk, row.state, row.cause) == (True, "cancelled", "hand")
    assert (row.due_at, row.first_due_at) == (ended.due_at, ended.first_due_at)


def test_a_row_of_another_round_is_cancelled_alone(unarmed: Order) -> None:
    unarmed.save()
    row = unarmed.timeouts.get()
    unarmed.status = "paying"
    unarmed.save()
    assert dq.cancel_timeout(row) is True, "it has ended already"
    unarmed.status = "unpaid"
    unarmed.save()
    assert unarmed.timeouts.filter(state="pending").exists()


def test_only_the_automatic_round_of_an_object_with_a_deadline_is_closed(unarmed: Order, declare: Declare) -> None:
    """Nothing is written for a key, a policy without `since`, or an object without its value, or that is gone."""
    exempt = declare(Order, name="exempt", after=lambda order: None, since="created_at", when=Q(status="unpaid"))
    for policy, key in (("remind", ""), ("cancel_unpaid", "another"), (exempt, "")):
        assert dq.cancel_timeout(unarmed, policy, key=key) is True
    Order.objects.update(created_at=None)
    assert dq.cancel_timeout(unarmed, "cancel_unpaid") is True
    Order.objects.all()._raw_delete("default")
    assert dq.cancel_timeout(unarmed, "cancel_unpaid") is True
    assert not Timeout.objects.exists()


@pytest.mark.parametrize("wrong", [ZeroDivisionError(), OperationalError("gone"), "beyond the calendar"], ids=str)
def test_an_object_whose_deadline_cannot_be_computed_can_be_cancelled_and_paid(
    unarmed: Order, declare: Declare, caplog: pytest.LogCaptureFixture, wrong: Any
) -> None:
    """It does not match the condition, so that saving it never asks. An error of the database passes."""

    def since(order: Order) -> datetime:
        if isinstance(wrong, Exception):
            raise wrong
        return datetime(9999, 12, 31, tzinfo=UTC)

    policy = declare(Order, name="fails", after=HOUR, since=since, when=Q(status="shipped"))
    if isinstance(wrong, OperationalError):
        with pytest.raises(OperationalError):
            dq.cancel_timeout(unarmed, policy)
        return
    with transaction.atomic():
        assert async_to_sync(dq.acancel_timeout)(unarmed, policy) is True
        Order.objects.update(status="paid")
    assert Order.objects.get().status == "paid"
    records: list[Any] = [each for each in caplog.records if getattr(each, "event", "") == "close_failed"]
    expected = [] if isinstance(wrong, str) else [(policy.label, str(unarmed.pk), True)]
    assert [(record.policy, record.object_id, bool(record.exc_info)) for record in records] == expected


@pytest.mark.parametrize("way", ["cancel", "guard", "strict"])
def test_a_round_that_was_retried_is_displayed_and_cancelled_and_not_the_newer_one(order: Order, way: str) -> None:
    """An operator has retried it, after `since` had come back to its value."""
    row = as_if(dq.schedule_timeout(order, "remind", hours=1), "dead", "retries")
    as_if(dq.schedule_timeout(order, "remind", hours=1), "cancelled", "superseded")
    assert operations.retry(row, by="ada").changed == 1
    row.refresh_from_db()
    assert dq.get_deadline(order, "remind") == row.due_at
    for displayed in (order, Order.objects.prefetch_related("timeouts").get()):
        assert countdown_of(displayed, "remind").timeout_id == row.pk
    assert "Nothing is pending" not in str(dq.explain_timeout(order, "remind"))
    with heard("cancelled") as got:
        if way == "cancel":
            assert dq.cancel_timeout(order, "remind") is True
        else:
            with dq.before_deadline(order, "remind", strict=way == "strict") as timeout:
                assert timeout == row and timeout.state == "cancelled"
    assert (states(), got) == (["cancelled", "cancelled"], [("cancelled", row)])


# `on_conflict="once"`: a key that has fired for a due time is not scheduled for it again.


@pytest.fixture
def at(now: datetime) -> datetime:
    return now.replace(microsecond=123456) + HOUR


def once(order: Order, at: datetime | None, how: str, policy: Any = "remind", **options: Any) -> Timeout | None:
    options = {"key": "a day before", "on_conflict": "once", "at": at, **options}
    if how == "many":
        counted = dq.schedule_timeouts([order], policy, **options)
        return dq.pending_timeouts(order, policy, key=options["key"]).get() if counted else None
    schedule: Any = async_to_sync(dq.aschedule_timeout) if how == "async" else dq.schedule_timeout
    row: Timeout = schedule(order, policy, **options)
    return row if row.state == "pending" else None


one_and_many = pytest.mark.parametrize("how", ["one", "many"])


@pytest.mark.parametrize("how", ["one", "many", "async"])
def test_a_reminder_that_has_fired_is_not_scheduled_again_when_its_booking_is_edited(
    order: Order, at: datetime, how: str
) -> None:
    """The booking is moved to next week at last, and back: the reminder for next week would be wrong."""
    assert once(order, at, how)
    assert once(order, at, how), "while it is pending it is replaced"
    with clock.set_to(at + MINUTE):
        assert fire_due("testapp.order.remind") == 1
    assert once(order, at, how) is None
    with clock.set_to(at + HOUR):
        assert once(order, at, how) is None, "although the due time has passed, which otherwise means now"
    assert states() == ["fired"]
    assert once(order, at, how, key="an hour before"), "another key"
    assert once(order, at + 100 * HOUR, how), "another due time"
    assert once(order, at, how) is None
    newest = Timeout.objects.latest("id")
    assert (newest.state, newest.cause) == ("cancelled", "superseded")


@one_and_many
def test_a_due_time_that_had_passed_is_recognised_too(order: Order, at: datetime, how: str) -> None:
    with clock.set_to(at + 5 * HOUR):
        row = once(order, at, how)
        assert row is not None and row.due_at == row.run_at == at
        assert fire_due() == 1
        assert once(order, at, how) is None


@one_and_many
def test_what_did_not_fire_is_scheduled_again(order: Order, at: datetime, how: str) -> None:
    for settled, cause in (("cancelled", "hand"), ("skipped", "condition"), ("dead", "retries")):
        row = once(order, at, how)
        assert row is not None
        as_if(row, settled, cause)
    row = once(order, at, how)
    assert row is not None
    as_if(row, "firing", "")
    assert once(order, at, how) is None, "it fires just now"


@one_and_many
@pytest.mark.parametrize("delay", [{"seconds": 0}, {"after": HOUR}, {}], ids=str)
def test_a_deadline_that_counts_from_now_is_refused_because_each_call_has_another(
    order: Order, declare: Declare, how: str, delay: dict[str, Any]
) -> None:
    """A refund that was scheduled so was sent again with each repeated webhook, under a new idempotency key."""
    policy = declare(Order, name="refund", after=None if delay else HOUR)
    with pytest.raises(dq.InvalidDelay, match="Give at="):
        once(order, policy=policy, at=None, how=how, **delay)
    assert states() == []
