"""`hold_timeout` and `resume_timeout`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import IntegrityError, transaction
from django.db.models import Q

import django_delayq as dq
from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.held.times import HOUR, T0, Declare, again, at, hours
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """A policy that is scheduled by hand."""
    return declare(Order, name="by_hand", max_extensions=2)


@pytest.fixture
def row(policy: dq.TimeoutPolicy[Any], order: Order) -> Timeout:
    """A timeout that is due four hours after `T0`, and was held after one."""
    with at(0):
        dq.schedule_timeout(order, policy, hours=4)
    with at(1):
        held = dq.hold_timeout(order, policy, reason="in talks")
    assert held is not None
    return held


def test_a_held_timeout_keeps_the_rest_of_its_time(row: Timeout, order: Order, policy: Any) -> None:
    for found in (row, again(row)):
        assert (found.state, found.remaining, found.held_by_hand) == ("held", 3 * HOUR, True)
        assert hours(found.due_at) == 4
        assert hours(found.held_at) == 1
        assert not found.is_settled
        assert found.is_waiting
    with at(100):
        assert not fire_due(raises=False)
        resumed = dq.resume_timeout(order, policy, reason="they agreed")
    assert resumed is not None
    for found in (resumed, again(row)):
        assert (found.state, found.remaining, found.held_by_hand, found.held_at) == ("pending", None, False, None)
        assert hours(found.due_at) == hours(found.run_at) == 103
        assert hours(found.restarted_at) == hours(found.ready_at) == 100
    assert [(event["what"], event["by"], event["reason"]) for event in resumed.history] == [
        ("held", "hand", "in talks"),
        ("resumed", "hand", "they agreed"),
    ]
    with at(103):
        assert len(fire_due().fired) == 1
    assert again(row).lateness() == 0


def test_nothing_to_hold_or_to_resume(order: Order, policy: Any) -> None:
    assert dq.hold_timeout(order, policy) is None
    pending = dq.schedule_timeout(order, policy, hours=1)
    assert dq.resume_timeout(order, policy) is None
    assert again(pending).state == "pending"
    dq.cancel_timeout(order, policy)
    assert dq.hold_timeout(pending) is None


@pytest.mark.parametrize(
    ("until", "words"), [(T0, "in the past"), (T0.replace(tzinfo=None), "naive"), ("tomorrow", "datetime")]
)
def test_a_wrong_end_is_refused(order: Order, policy: Any, until: Any, words: str) -> None:
    pending = dq.schedule_timeout(order, policy, at=T0 + HOUR)
    with at(0.5), pytest.raises(dq.InvalidDelay, match=words):
        dq.hold_timeout(order, policy, until=until)
    assert again(pending).state == "pending"


def test_a_hold_with_an_end_ends_then_however_late_it_is_noticed(row: Timeout, order: Order, policy: Any) -> None:
    with at(2):
        dq.hold_timeout(order, policy, until=T0 + 10 * HOUR)
    assert (again(row).remaining, hours(again(row).held_until)) == (3 * HOUR, 10)
    with at(9.9):
        assert end_holds_by_hand("default") == 0
    with at(11):
        assert end_holds_by_hand("default") == 1
    found = again(row)
    assert (found.state, hours(found.due_at), hours(found.restarted_at)) == ("pending", 13, 10)


@pytest.mark.parametrize("verb", ["hold", "resume", "extend", "reschedule"])
def test_what_comes_after_the_end_counts_as_if_a_worker_had_noticed_it(
    row: Timeout, order: Order, policy: Any, verb: str
) -> None:
    with at(2):
        dq.hold_timeout(order, policy, until=T0 + 10 * HOUR)
    with at(11):
        if verb == "hold":
            dq.hold_timeout(order, policy)
            assert again(row).remaining == 2 * HOUR
        elif verb == "resume":
            dq.resume_timeout(order, policy)
            assert hours(again(row).due_at) == 13
        elif verb == "extend":
            dq.extend_timeout(order, policy, hours=1)
            assert hours(again(row).due_at) == 14
        else:
            dq.reschedule_timeout(order, policy, hours=1)
            assert hours(again(row).due_at) == 12


def test_a_deadline_that_has_passed_leaves_nothing(order: Order, policy: Any) -> None:
    with at(0):
        row = dq.schedule_timeout(order, policy, hours=1)
    with at(2):
        assert dq.hold_timeout(row) is not None
    assert again(row).remaining == timedelta(0)
    with at(5):
        assert not fire_due()
        dq.resume_timeout(row)
        assert len(fire_due().fired) == 1


def test_a_retry_and_a_snooze_wait_as_long_as_before(declare: Declare, order: Order) -> None:
    def fail(obj: Order, timeout: Timeout) -> None:
        raise dq.Snooze(hours=5)

    policy = declare(Order, fail, name="snoozing")
    with at(0):
        row = dq.schedule_timeout(order, policy, hours=1)
    with at(1):
        fire_due()
    with at(2):
        dq.hold_timeout(row)
    assert again(row).remaining == 4 * HOUR
    with at(10):
        dq.resume_timeout(row)
    assert hours(again(row).run_at) == 14


def test_it_can_be_extended_and_rescheduled_while_it_is_held(row: Timeout, order: Order, policy: Any) -> None:
    with at(20):
        dq.extend_timeout(order, policy, hours=2)
        assert (again(row).state, again(row).remaining, again(row).extensions) == ("held", 5 * HOUR, 1)
    with at(21):
        moved = dq.reschedule_timeout(order, policy, hours=7)
    assert moved is not None
    assert (moved.state, again(row).remaining, hours(again(row).due_at)) == ("held", 7 * HOUR, 28)
    assert again(row).run_at.year > 2100
    with at(30):
        dq.resume_timeout(order, policy)
    assert hours(again(row).run_at) == 37


def test_cancelling_keeps_the_rest_and_a_guard_proceeds(row: Timeout, order: Order, policy: Any) -> None:
    with at(50), pytest.raises(ZeroDivisionError), dq.before_deadline(order, policy, strict=True):
        raise ZeroDivisionError
    assert again(row).state == "held"
    with at(50), dq.before_deadline(order, policy, strict=True) as found:
        assert found == row
    assert (again(row).state, again(row).remaining) == ("cancelled", 3 * HOUR)
    assert dq.cancel_timeout(order, policy)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_scheduling_again_begins_anew(row: Timeout, order: Order, policy: Any, in_transaction: bool) -> None:
    with at(5):
        assert dq.schedule_timeout(order, policy, hours=1, on_conflict="keep") == row
        with pytest.raises(dq.TimeoutConflict):
            dq.schedule_timeout(order, policy, hours=1, on_conflict="error")
        assert again(row).state == "held"
        if in_transaction:
            with transaction.atomic():
                new = dq.schedule_timeout(order, policy, hours=1)
        else:
            new = dq.schedule_timeout(order, policy, hours=1)
    assert new.pk == row.pk
    for found in (new, again(row)):
        assert (found.state, found.remaining, found.held_by_hand, found.held_at) == ("pending", None, False, None)
        assert hours(found.run_at) == 6


def test_scheduling_many_again_begins_anew(row: Timeout, order: Order, policy: Any) -> None:
    with at(5):
        assert dq.schedule_timeouts([order], policy, hours=1, on_conflict="keep") == 0
        assert dq.schedule_timeouts([order], policy, hours=1) == 1
    assert (again(row).state, again(row).remaining, again(row).held_by_hand) == ("pending", None, False)


def test_deleting_the_object_cancels(row: Timeout, order: Order) -> None:
    order.delete()
    assert (again(row).state, again(row).cause) == ("cancelled", "gone")


def test_signals_report_both(row: Timeout, order: Order, policy: Any) -> None:
    seen: list[tuple[str, str]] = []

    def note(signal: Any, timeout: Timeout, **_: Any) -> None:
        seen.append(("held" if signal is dq.timeout_held else "resumed", timeout.state))

    for signal in (dq.timeout_held, dq.timeout_resumed):
        signal.connect(note)
    try:
        dq.resume_timeout(order, policy)
        dq.hold_timeout(order, policy)
    finally:
        for signal in (dq.timeout_held, dq.timeout_resumed):
            signal.disconnect(note)
    assert seen == [("resumed", "pending"), ("held", "held")]


def test_the_async_twins(row: Timeout, order: Order, policy: Any) -> None:
    assert async_to_sync(dq.aresume_timeout)(order, policy) == row
    held = async_to_sync(dq.ahold_timeout)(order, policy)
    assert held is not None
    assert held.state == "held"


def test_the_database_refuses_a_held_row_without_a_rest(row: Timeout) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        Timeout.objects.filter(pk=row.pk).update(remaining=None)


def test_a_hold_of_its_policy_has_stopped_the_clock_before(declare: Declare) -> None:
    from django_delayq import operations

    policy = declare(Order, name="both", after=10 * HOUR, since="created_at", when=Q(status="unpaid"))
    with at(0):
        order = Order.objects.create(created_at=T0)
    with at(2):
        operations.hold(policy, by="admin:a")
    with at(5):
        row = dq.hold_timeout(order, policy)
    assert row is not None
    assert row.remaining == 8 * HOUR
    with at(6):
        dq.resume_timeout(order, policy)
    assert hours(again(row).due_at) == 14
    with at(7):
        operations.resume(policy, by="admin:a")
    assert hours(again(row).due_at) == 15
    with at(8):
        dq.hold_timeout(order, policy)
        operations.hold(policy, by="admin:a")
    with at(9):
        operations.resume(policy, by="admin:a")
    with at(20):
        dq.resume_timeout(order, policy)
    assert hours(again(row).due_at) == 27
