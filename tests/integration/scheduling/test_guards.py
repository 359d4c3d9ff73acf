"""`before_deadline`: one winner, and both sides learn which (P5)."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.arming import applying
from django_delayq.backoff import LogInterval
from django_delayq.models import Timeout
from django_delayq.sql.dialects import dialect_of
from tests.integration.operations.conftest import as_if
from tests.support.seen import heard
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
SECOND = timedelta(seconds=1)
UNPAID = "testapp.order.cancel_unpaid"


@pytest.fixture
def order() -> Order:
    return Order.objects.create(created_at=timezone.now())


def pay(order: Order, **options: Any) -> None:
    with dq.before_deadline(order, "cancel_unpaid", **options):
        order.status = "paid"
        order.save()


def refused(error: type[Exception], target: Any, **options: Any) -> Any:
    """Return the error of a guard whose block does not run."""
    policy = () if isinstance(target, Timeout) else ("cancel_unpaid",)
    with pytest.raises(error) as raised, dq.before_deadline(target, *policy, **options):
        pytest.fail("the block ran")
    return raised.value


@pytest.mark.parametrize("strict", [False, True])
def test_in_time_the_block_runs_on_the_locked_row_and_the_timeout_will_not(order: Order, strict: bool) -> None:
    Order.objects.update(note="by another process")
    order.note = "not saved"
    just_before = Timeout.objects.get().due_at - timedelta(microseconds=1)
    with clock.set_to(just_before), dq.before_deadline(order, "cancel_unpaid", strict=strict) as timeout:
        assert timeout is not None and order.note == "by another process"
        operations.refire(Timeout.objects.all(), by="ana")
        order.status = "paid"
        order.save()
    row = Timeout.objects.earliest("id")
    assert (row.pk, row.state, row.cause) == (timeout.pk, "cancelled", "condition")
    assert [event["what"] for event in row.history] == ["refired"], "what the block notes in its history is kept"


@pytest.mark.parametrize(
    ("state", "cause"), [("skipped", "condition"), ("dead", "retries"), ("cancelled", "hand"), (None, None)]
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_round_that_did_not_fire_lets_the_payment_through(
    order: Order, state: str | None, cause: str, strict: bool
) -> None:
    """A strict guard counts a dead one as too late; any other buries it."""
    row = Timeout.objects.get()
    if state is None:
        row.delete()
    else:
        as_if(row, state, cause)
    with clock.set_to(row.due_at), contextlib.suppress(dq.DeadlinePassed):
        pay(order, strict=strict)
    assert Order.objects.get().status == ("unpaid" if strict and state == "dead" else "paid")
    ends = "cancelled" if state == "dead" and not strict else state
    assert list(Timeout.objects.values_list("state", flat=True)) == [ends] * (state is not None)


def test_an_exception_in_the_block_undoes_the_cancelling(order: Order) -> None:
    with pytest.raises(ZeroDivisionError), dq.before_deadline(order, "cancel_unpaid"):
        raise ZeroDivisionError
    assert Timeout.objects.get().state == "pending"


@pytest.mark.parametrize("by", ["save", "sync", "rolled back"])
def test_a_round_that_begins_again_after_a_guard_is_reported(
    order: Order, by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Most likely an old instance was saved over a payment. One warning a minute, and a signal for each."""
    monkeypatch.setattr(applying, "_rearmed_interval", LogInterval(60))
    with heard("rearmed") as got:
        for each in (order, Order.objects.create(created_at=timezone.now())):
            old = Order.objects.get(pk=each.pk)
            pay(each)
            with contextlib.suppress(ZeroDivisionError), transaction.atomic():
                if by == "sync":
                    Order.objects.filter(pk=each.pk).update(status="unpaid")
                    dq.sync_timeouts(each)
                else:
                    old.save()
                assert dq.pending_timeouts(each).count() == 1
                if by == "rolled back":
                    raise ZeroDivisionError
    lines = [each for each in caplog.records if vars(each).get("event") == "timeout_rearmed"]
    seen = [timeout.pk for _, timeout in got]
    assert seen == [row.pk for row in Timeout.objects.pending().order_by("pk")]
    assert [vars(line)["timeout_id"] for line in lines] == seen[:1]
    assert len(seen) == (0 if by == "rolled back" else 2)


def test_a_round_that_a_save_has_ended_may_begin_again_without_a_word(order: Order) -> None:
    with heard("rearmed") as got:
        for status in ("paid", "unpaid"):
            order.status = status
            order.save()
    assert (dq.pending_timeouts(order).count(), got) == (1, [])


def test_a_round_stays_closed_by_hand_if_the_block_leaves_its_condition_true_or_support_was_first(order: Order) -> None:
    with dq.before_deadline(order, "cancel_unpaid"):
        order.note = "still unpaid"
    order.save()
    pay(order)
    row = Timeout.objects.get()
    assert (row.state, row.cause) == ("cancelled", "hand")


@pytest.mark.parametrize("given", ["object", "row"])
def test_a_strict_guard_refuses_from_the_deadline_on_and_the_round_stays_pending(order: Order, given: str) -> None:
    row, columns = Timeout.objects.get(), [field.attname for field in Timeout._meta.concrete_fields]
    before = Timeout.objects.values(*columns).get()
    with clock.set_to(row.due_at):
        late = refused(dq.DeadlinePassed, order if given == "object" else row, strict=True)
        assert (late.timeout, late.timeout.state) == (row, "pending")
        assert "has passed" in str(late)
        assert Timeout.objects.values(*columns).get() == before
        pay(order)
    assert Timeout.objects.get().state == "cancelled"


@pytest.mark.skipif(not dialect_of(connection).server_time, reason="SQLite has no clock of its own")
def test_a_strict_guard_asks_the_clock_of_the_database(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    behind, row = timezone.now() - timedelta(days=1), Timeout.objects.get()
    Timeout.objects.update(due_at=row.due_at - timedelta(minutes=31))
    monkeypatch.setattr(clock, "now", lambda: behind)
    refused(dq.DeadlinePassed, order, strict=True)


def test_deadlines_of_a_paused_policy_pass_and_those_on_hold_stand_still_unless_they_had_passed(order: Order) -> None:
    due_at = Timeout.objects.get().due_at
    operations.pause(UNPAID, by="ana")
    with clock.set_to(due_at + SECOND):
        refused(dq.DeadlinePassed, order, strict=True)
        operations.hold(UNPAID, by="ana")
        refused(dq.DeadlinePassed, order, strict=True)
    operations.resume(UNPAID, by="ana", shift=False)
    with clock.set_to(due_at - SECOND):
        operations.hold(UNPAID, by="ana")
    with clock.set_to(due_at + SECOND):
        pay(order, strict=True)
    assert Timeout.objects.get().state == "cancelled"


def test_while_a_handler_decides_nothing_is_decided_yet(order: Order) -> None:
    as_if(Timeout.objects.get(), "firing", "")
    undecided = refused(dq.DeadlineUndecided, order)
    assert (isinstance(undecided, dq.DeadlinePassed), undecided.timeout.state) == (True, "firing")
    as_if(Timeout.objects.get(), "fired", "due")
    assert not isinstance(refused(dq.DeadlinePassed, order), dq.DeadlineUndecided)


def test_waiting_lets_the_first_payment_through_and_not_the_second(order: Order) -> None:
    pay(order, waiting=True)
    refused(dq.NotWaiting, order, waiting=True)
    as_if(Timeout.objects.get(), "fired", "due")
    refused(dq.DeadlinePassed, order, waiting=True)  # reported first
    dq.schedule_timeout(order, "remind", minutes=5)
    with dq.before_deadline(order, "remind", waiting=True) as timeout:
        assert timeout is not None, "without a condition it means nothing"
