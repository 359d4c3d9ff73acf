"""`on_conflict="once"`: a key that has fired for a due time is not scheduled for it again."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.workers import states_in_order as states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)
State = Timeout.State


@pytest.fixture
def at() -> datetime:
    return timezone.now().replace(microsecond=123456) + HOUR


def once(order: Order, at: datetime | None, how: str = "one", policy: Any = "remind", **options: Any) -> Timeout | None:
    options = {"key": "a day before", "on_conflict": "once", "at": at, **options}
    if how == "many":
        counted = dq.schedule_timeouts([order], policy, **options)
        return dq.pending_timeouts(order, policy, key=options["key"]).get() if counted else None
    schedule: Any = async_to_sync(dq.aschedule_timeout) if how == "async" else dq.schedule_timeout
    row: Timeout = schedule(order, policy, **options)
    return row if row.state == State.PENDING else None


def fired(at: datetime) -> None:
    with clock.set_to(at + timedelta(seconds=1)):
        assert fire_due("testapp.order.remind") == 1


one_and_many = pytest.mark.parametrize("how", ["one", "many"])


@pytest.mark.parametrize("how", ["one", "many", "async"])
def test_a_reminder_that_has_fired_is_not_scheduled_again_when_its_booking_is_edited(
    order: Order, at: datetime, how: str
) -> None:
    """The booking is moved to next week at last, and back: the reminder for next week would be wrong."""
    assert once(order, at, how)
    assert once(order, at, how), "while it is pending it is replaced"
    fired(at)
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
    assert states() == ["fired"]


@one_and_many
def test_what_did_not_fire_is_scheduled_again(order: Order, at: datetime, how: str) -> None:
    for settled, cause in ((State.CANCELLED, "hand"), (State.SKIPPED, "condition"), (State.DEAD, "retries")):
        row = once(order, at, how)
        assert row is not None
        Timeout.objects.filter(pk=row.pk).update(state=settled, cause=cause, settled_at=timezone.now(), slot_taken=None)
    assert once(order, at, how)
    Timeout.objects.filter(slot_taken=1).update(state=State.FIRING, slot_taken=None)
    assert once(order, at, how) is None, "it fires just now"


@one_and_many
@pytest.mark.parametrize("move", ["postpone", "fire", "reschedule"])
def test_of_one_that_was_moved_the_due_time_that_the_application_has_asked_for_counts(
    order: Order, at: datetime, how: str, move: str
) -> None:
    row, asked = once(order, at, how), at
    assert row is not None
    if move == "fire":
        operations.fire_now(row, by="ana", reason="call")
    elif move == "postpone":
        operations.postpone(row, by="ana", reason="call", hours=1)
    else:
        dq.reschedule_timeout(row, at=(asked := at + HOUR))
    with clock.set_to(at + 2 * HOUR):
        assert fire_due() == 1
    assert Timeout.objects.get().due_at != at
    assert once(order, asked, how) is None
    if move == "reschedule":
        assert once(order, at, how), "it has never fired for this one"


@one_and_many
@pytest.mark.parametrize("delay", [{"seconds": 0}, {"minutes": 5}, {"after": HOUR}, {}], ids=str)
def test_a_deadline_that_counts_from_now_is_refused_because_each_call_has_another(
    order: Order, declare: Any, how: str, delay: dict[str, Any]
) -> None:
    """A refund that was scheduled so was sent again with each repeated webhook, under a new idempotency key."""
    policy = declare(Order, name="refund", after=None if delay else HOUR)
    with pytest.raises(dq.InvalidDelay, match="Give at="):
        once(order, policy=policy, at=None, how=how, **delay)
    assert states() == []


def test_many_are_scheduled_but_those_that_have_fired(at: datetime) -> None:
    orders = [Order.objects.create(status="new") for _ in range(6)]
    dq.schedule_timeouts(orders[:2], "remind", at=at)
    with clock.set_to(at):
        assert fire_due() == 2
    dq.schedule_timeout(orders[2], "remind", at=at + HOUR)
    assert dq.schedule_timeouts(Order.objects.all(), "remind", at=at, on_conflict="once") == 4
    assert {row.due_at for row in dq.pending_timeouts(Order, "remind")} == {at}
