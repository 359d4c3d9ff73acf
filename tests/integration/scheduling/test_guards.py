"""`before_deadline`: one winner, and both sides learn which (P5)."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import Model
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.arming import applying
from django_delayq.backoff import LogInterval
from django_delayq.models import Timeout
from django_delayq.signals import timeout_rearmed
from django_delayq.sql.dialects import dialect_of
from tests.integration.operations.conftest import as_if
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def order() -> Order:
    return Order.objects.create(created_at=timezone.now())


def test_in_time_the_block_runs_and_the_timeout_will_not(order: Order) -> None:
    with dq.before_deadline(order, "cancel_unpaid") as timeout:
        assert timeout is not None
        order.status = "paid"
        order.save()
    row = Timeout.objects.get()
    assert (row.pk, row.state, row.cause) == (timeout.pk, "cancelled", "condition")


def test_what_the_block_notes_in_the_history_of_the_timeout_is_kept(order: Order) -> None:
    with dq.before_deadline(order, "cancel_unpaid") as timeout:
        operations.refire(Timeout.objects.all(), by="ana")
        order.status = "paid"
        order.save()
    assert timeout is not None
    timeout.refresh_from_db()
    assert (timeout.cause, [event["what"] for event in timeout.history]) == ("condition", ["refired"])


def test_the_object_is_refreshed_from_the_locked_row(order: Order) -> None:
    Order.objects.update(note="by another process")
    order.note = "not saved"
    with dq.before_deadline(order, "cancel_unpaid"):
        assert order.note == "by another process"


@pytest.mark.skipif(not connection.features.has_select_for_update, reason="SQLite locks no rows")
def test_the_object_is_locked_although_its_model_ignores_the_locking_query(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a `refresh_from_db` from before Django 5.1, which does not pass on the `from_queryset` that it is given."""

    def refresh(self: Order, using: str | None = None, fields: Any = None, **_: Any) -> None:
        Model.refresh_from_db(self, using=using, fields=fields)

    free = list[int]()

    def look() -> None:
        with transaction.atomic():
            free.extend(Order.objects.select_for_update(skip_locked=True).values_list("pk", flat=True))
        connections.close_all()

    monkeypatch.setattr(Order, "refresh_from_db", refresh)
    with dq.before_deadline(order, "cancel_unpaid"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(20)
    assert free == []


@pytest.mark.parametrize(
    ("state", "cause"), [("skipped", "condition"), ("dead", "retries"), ("cancelled", "hand"), (None, None)]
)
def test_a_round_that_did_not_fire_lets_the_payment_through(order: Order, state: str | None, cause: str) -> None:
    if state is None:
        Timeout.objects.all().delete()
    else:
        as_if(Timeout.objects.get(), state, cause)
    with dq.before_deadline(order, "cancel_unpaid"):
        order.status = "paid"
        order.save()
    assert Order.objects.get().status == "paid"


def test_an_exception_in_the_block_undoes_the_cancelling(order: Order) -> None:
    with pytest.raises(ZeroDivisionError), dq.before_deadline(order, "cancel_unpaid"):
        raise ZeroDivisionError
    assert Timeout.objects.get().state == "pending"


@pytest.mark.parametrize("by", ["save", "sync", "save in a transaction", "rolled back"])
def test_a_round_that_begins_again_after_a_guard_is_reported(
    order: Order, by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Most likely an old instance was saved over a payment. One warning a minute, and a signal for each."""
    monkeypatch.setattr(applying, "_rearmed_interval", LogInterval(60))
    seen: list[int] = []
    timeout_rearmed.connect(note := lambda timeout, **_: seen.append(timeout.pk), weak=False)
    try:
        for each in (order, Order.objects.create(created_at=timezone.now())):
            old = Order.objects.get(pk=each.pk)
            with dq.before_deadline(each, "cancel_unpaid"):
                each.status = "paid"
                each.save()
            assert not dq.pending_timeouts(each)
            block = transaction.atomic() if " " in by else contextlib.nullcontext()
            with contextlib.suppress(ZeroDivisionError), block:
                if by == "sync":
                    Order.objects.filter(pk=each.pk).update(status="unpaid")
                    dq.sync_timeouts(each)
                else:
                    old.save()
                assert dq.pending_timeouts(each).count() == 1
                if by == "rolled back":
                    raise ZeroDivisionError
    finally:
        timeout_rearmed.disconnect(note)
    lines = [each for each in caplog.records if vars(each).get("event") == "timeout_rearmed"]
    pending = [*Timeout.objects.pending().order_by("pk")]
    assert seen == [row.pk for row in pending]
    assert [vars(line)["timeout_id"] for line in lines] == seen[:1]
    assert len(seen) == (0 if by == "rolled back" else 2)


def test_a_round_that_a_save_has_ended_may_begin_again_without_a_word(order: Order) -> None:
    seen: list[int] = []
    timeout_rearmed.connect(note := lambda timeout, **_: seen.append(timeout.pk), weak=False)
    for status in ("paid", "unpaid"):
        order.status = status
        order.save()
    timeout_rearmed.disconnect(note)
    assert dq.pending_timeouts(order).count() == 1
    assert seen == []


def test_a_block_that_leaves_the_condition_true_closes_the_round_by_hand(order: Order) -> None:
    with dq.before_deadline(order, "cancel_unpaid"):
        order.note = "still unpaid"
    order.save()
    row = Timeout.objects.get()
    assert (row.state, row.cause) == ("cancelled", "hand")


def test_a_round_that_support_cancelled_earlier_stays_closed_by_hand(order: Order) -> None:
    dq.cancel_timeout(order, "cancel_unpaid", reason="called in")
    with dq.before_deadline(order, "cancel_unpaid"):
        order.status = "paid"
        order.save()
    assert Timeout.objects.get().cause == "hand"


SECOND = timedelta(seconds=1)


def pay(order: Order, **options: Any) -> None:
    with dq.before_deadline(order, "cancel_unpaid", **options):
        order.status = "paid"
        order.save()


@pytest.mark.parametrize("late_by", [timedelta(0), SECOND])
def test_a_strict_guard_refuses_from_the_deadline_on_and_the_round_stays_pending(
    order: Order, late_by: timedelta
) -> None:
    row = Timeout.objects.get()
    with clock.set_to(row.due_at + late_by):
        with pytest.raises(dq.DeadlinePassed, match="has passed") as late:
            pay(order, strict=True)
        assert (late.value.timeout, late.value.timeout.state) == (row, "pending")
        assert {**vars(Timeout.objects.get()), "_state": None} == {**vars(row), "_state": None}
        assert Order.objects.get().status == "unpaid"
        pay(order)
    assert Timeout.objects.get().state == "cancelled"


def test_a_strict_guard_in_time_cancels_like_any_other(order: Order) -> None:
    with clock.set_to(Timeout.objects.get().due_at - timedelta(microseconds=1)):
        pay(order, strict=True)
    row = Timeout.objects.get()
    assert (row.state, row.cause) == ("cancelled", "condition")
    assert Order.objects.get().status == "paid"


def test_a_strict_guard_asks_the_clock_of_the_database(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dialect_of(connection).server_time:
        pytest.skip("SQLite has no clock of its own")
    behind, row = timezone.now() - timedelta(days=1), Timeout.objects.get()
    Timeout.objects.update(due_at=row.due_at - timedelta(minutes=31))
    monkeypatch.setattr(clock, "now", lambda: behind)
    with pytest.raises(dq.DeadlinePassed):
        pay(order, strict=True)


@pytest.mark.parametrize(("state", "is_late"), [("dead", True), ("skipped", False), ("cancelled", False)])
def test_a_strict_guard_counts_a_dead_round_as_too_late_but_not_one_that_was_dropped(
    order: Order, state: str, is_late: bool
) -> None:
    as_if(Timeout.objects.get(), state, "retries" if state == "dead" else "hand")
    with clock.set_to(Timeout.objects.get().due_at):
        if is_late:
            with pytest.raises(dq.DeadlinePassed):
                pay(order, strict=True)
        else:
            pay(order, strict=True)
    assert Timeout.objects.get().state == state


def test_deadlines_of_a_paused_policy_pass_and_those_on_hold_stand_still(order: Order) -> None:
    due_at = Timeout.objects.get().due_at
    operations.pause("testapp.order.cancel_unpaid", by="ana")
    with clock.set_to(due_at + SECOND), pytest.raises(dq.DeadlinePassed):
        pay(order, strict=True)
    operations.resume("testapp.order.cancel_unpaid", by="ana")
    with clock.set_to(due_at - SECOND):
        operations.hold("testapp.order.cancel_unpaid", by="ana")
    with clock.set_to(due_at + SECOND):
        pay(order, strict=True)
    assert Timeout.objects.get().state == "cancelled"


def test_a_hold_does_not_reopen_a_deadline_that_had_passed_before(order: Order) -> None:
    due_at = Timeout.objects.get().due_at
    with clock.set_to(due_at + SECOND):
        operations.hold("testapp.order.cancel_unpaid", by="ana")
        with pytest.raises(dq.DeadlinePassed):
            pay(order, strict=True)


def test_a_strict_guard_of_a_row_leaves_it_pending_too(order: Order) -> None:
    row = order.timeouts.get()
    with (
        clock.set_to(row.due_at),
        pytest.raises(dq.DeadlinePassed),
        dq.before_deadline(row, strict=True),
    ):
        pytest.fail("the block ran")
    assert Timeout.objects.get().state == row.state == "pending"


def test_while_a_handler_decides_nothing_is_decided_yet(order: Order) -> None:
    as_if(Timeout.objects.get(), "firing", "")
    with pytest.raises(dq.DeadlineUndecided) as raised, dq.before_deadline(order, "cancel_unpaid"):
        pytest.fail("the block ran")
    assert isinstance(raised.value, dq.DeadlinePassed)
    assert raised.value.timeout.state == "firing"
    as_if(Timeout.objects.get(), "fired", "due")
    with pytest.raises(dq.DeadlinePassed) as passed, dq.before_deadline(order, "cancel_unpaid"):
        pytest.fail("the block ran")
    assert not isinstance(passed.value, dq.DeadlineUndecided)


@pytest.mark.parametrize("status", ["paid", "cancelled"])
def test_waiting_refuses_an_object_that_waits_no_more(order: Order, status: str) -> None:
    Order.objects.update(status=status)
    with pytest.raises(dq.NotWaiting), dq.before_deadline(order, "cancel_unpaid", waiting=True):
        pytest.fail("the block ran")
    assert Timeout.objects.get().state == "pending", "what it had cancelled is undone"
    with dq.before_deadline(order, "cancel_unpaid"):
        assert order.status == status


def test_waiting_lets_the_first_payment_through_and_not_the_second(order: Order) -> None:
    for is_first in (True, False):
        with (
            contextlib.nullcontext() if is_first else pytest.raises(dq.NotWaiting),
            dq.before_deadline(order, "cancel_unpaid", waiting=True),
        ):
            assert is_first
            order.status = "paid"
            order.save()


def test_waiting_reports_first_that_it_is_too_late(order: Order) -> None:
    Order.objects.update(status="cancelled")
    as_if(Timeout.objects.get(), "fired", "due")
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, "cancel_unpaid", waiting=True):
        pytest.fail("the block ran")


def test_waiting_means_nothing_without_a_condition_and_takes_no_other_value(order: Order) -> None:
    dq.schedule_timeout(order, "remind", minutes=5)
    with dq.before_deadline(order, "remind", waiting=True) as timeout:
        assert timeout is not None
    with pytest.raises(TypeError, match="waiting is True or False"), dq.before_deadline(order, "remind", waiting=1):  # type: ignore[arg-type]
        pytest.fail("the block ran")
