"""A new delay applies to what is armed from now on, and moves the timeouts that are pending at its request once."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import (
    InvalidDelay,
    clock,
    extend_timeout,
    get_policy,
    operations,
    pending_timeouts,
    reschedule_timeout,
    schedule_timeout,
    sync_timeouts,
)
from django_delayq.arming.sync import sync_policy
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import PolicyChange, Timeout
from django_delayq.operations import change_delay, preview_delay
from django_delayq.operations.changes import move_missed
from django_delayq.scheduling.bulk import schedule_timeouts
from tests.integration.firing.conftest import another_session
from tests.integration.operations.conftest import BY, changes, said
from tests.integration.operations.names import MINUTE, REMIND, UNPAID, Declare, PagesOf
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def unpaid(ago: timedelta = timedelta(0)) -> Order:
    return Order.objects.create(status="unpaid", created_at=timezone.now() - ago)


def waits(order: Order) -> timedelta:
    """How long after its creation the order is due."""
    assert order.created_at is not None
    return pending_timeouts(order).get().due_at - order.created_at


def test_what_is_armed_by_saving_has_the_changed_delay_at_once_and_for_no_further_query() -> None:
    unpaid()  # the first one looks up and compiles
    with CaptureQueriesContext(connection) as without:
        before = unpaid()
    change_delay(UNPAID, 45 * MINUTE, by=BY, reason="holidays")
    with CaptureQueriesContext(connection) as changed:
        after = unpaid()
    assert len(changed) == len(without)
    assert (waits(before), waits(after)) == (30 * MINUTE, 45 * MINUTE)
    change_delay(UNPAID, None, by=BY)
    assert waits(unpaid()) == 30 * MINUTE
    assert changes() == [("delay", BY, "holidays"), ("delay", BY, "")]


def test_every_other_way_to_arm_has_it_too_unless_the_caller_names_a_delay() -> None:
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now() - 90 * MINUTE)])
    assert sync_policy(get_policy(UNPAID), "default").armed == 0, "too old for the declared delay"
    change_delay(UNPAID, 120 * MINUTE, by=BY)
    assert sync_policy(get_policy(UNPAID), "default").armed == 1
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now()) for _ in range(4)])
    _old, *orders = Order.objects.order_by("pk")
    schedule_timeout(orders[0], "cancel_unpaid")
    schedule_timeouts(orders[1:2], "cancel_unpaid")
    sync_timeouts(orders[2])
    sync_policy(get_policy(UNPAID), "default")
    assert [waits(order) for order in orders] == [120 * MINUTE] * 4
    assert schedule_timeout(unpaid(), "cancel_unpaid", minutes=5).due_at < timezone.now() + 6 * MINUTE


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("keep", [30 * MINUTE, 90 * MINUTE]),
        ("recompute", [45 * MINUTE, 90 * MINUTE]),
        ("shift", [45 * MINUTE, 105 * MINUTE]),
    ],
)
def test_pending_deadlines_follow_as_they_are_told(mode: Any, expected: list[timedelta]) -> None:
    plain, by_hand = unpaid(), unpaid()
    row = pending_timeouts(plain).get()
    assert by_hand.created_at is not None
    schedule_timeout(by_hand, "cancel_unpaid", at=by_hand.created_at + 90 * MINUTE)
    change = change_delay(UNPAID, 45 * MINUTE, by=BY, reason="holidays", mode=mode)
    assert [waits(plain), waits(by_hand)] == expected
    moved = {"keep": 0, "recompute": 1, "shift": 2}[mode]
    assert (change.moved, change.finished_at is not None) == (moved, True)
    assert said(row)[-1:] == ([("replanned", BY, "holidays")] if moved else [])


def test_what_cannot_move_stays_and_is_counted_and_a_longer_retry_goes_on_waiting() -> None:
    near, far, tried = unpaid(), unpaid(), unpaid()
    latest = reschedule_timeout(far, "cancel_unpaid", at=datetime(2108, 6, 1, tzinfo=UTC))
    retry_at = timezone.now() + timedelta(days=400)
    pending_timeouts(tried).update(run_at=retry_at, attempts=1)
    change = change_delay(UNPAID, timedelta(days=365), by=BY, mode="shift")
    assert (change.moved, change.unmoved, change.finished_at is None) == (2, 1, False)
    assert waits(near) == waits(tried) == timedelta(days=365)
    assert pending_timeouts(tried).get().run_at == retry_at
    change_delay(UNPAID, 45 * MINUTE, by=BY, mode="recompute")
    assert waits(near) == waits(tried) == 45 * MINUTE
    assert pending_timeouts(tried).get().run_at == retry_at
    assert latest is not None and pending_timeouts(far).get().due_at == latest.due_at


def test_a_preview_counts_what_would_be_due_at_once_and_no_further_than_it_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpaid(20 * MINUTE)
    unpaid(5 * MINUTE)
    seen = preview_delay(UNPAID, 10 * MINUTE)
    assert (seen.before, seen.after, seen.pending, seen.overdue) == (30 * MINUTE, 10 * MINUTE, 2, 1)
    assert not seen.is_capped and not PolicyChange.objects.exists()
    monkeypatch.setattr("django_delayq.operations.previews.MAX_COUNT", 1)
    assert preview_delay(UNPAID, 10 * MINUTE).is_capped


@pytest.mark.parametrize(
    ("label", "after", "mode", "words"),
    [
        ("testapp.order.by_hand", -MINUTE, "keep", "negative"),
        (UNPAID, timedelta(days=-999_999), "keep", "far in the past"),
        (UNPAID, 5, "keep", "timedelta"),
        ("testapp.order.remind", MINUTE, "keep", "declares no delay"),
        ("testapp.order.computed", MINUTE, "shift", "depends on the object"),
    ],
)
def test_what_makes_no_sense_changes_nothing(declare: Declare, label: str, after: Any, mode: Any, words: str) -> None:
    declare(Order, name="computed", after=lambda order: MINUTE, since="created_at", when=Q(status="never"))
    declare(Order, name="by_hand", after=MINUTE)
    for do in (lambda: preview_delay(label, after, mode), lambda: change_delay(label, after, by=BY, mode=mode)):
        with pytest.raises((ValueError, InvalidDelay), match=words):
            do()
    assert not PolicyChange.objects.exists()


def test_an_object_for_which_after_raises_keeps_its_deadline(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each worker would fail at it again, and no operator could change the policy until the code is fixed."""

    def after(order: Order) -> timedelta:
        return int(order.note or "60") * MINUTE

    policy = declare(Order, name="computed", after=after, since="created_at", when=Q(status="computed"))
    orders = [Order.objects.create(status="computed", created_at=timezone.now()) for _ in range(3)]
    Order.objects.filter(pk=orders[1].pk).update(note="oops")
    change_delay(policy, 2 * MINUTE, by=BY, mode="recompute")
    assert [waits(order) for order in orders] == [2 * MINUTE, 60 * MINUTE, 2 * MINUTE]
    change = PolicyChange.objects.get()
    assert (change.finished_at is not None, change.moved, change.unmoved) == (True, 2, 1)
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "replan_failed"]
    assert f"The first is that of object {orders[1].pk}: ValueError" in record.getMessage()


def test_a_connection_that_a_move_has_lost_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """MySQL may lose it after the COMMIT of a page. The error is logged only, and the view continues."""
    order = unpaid()
    commits = [0]
    backend: Any = connection
    switch = backend._set_autocommit

    def lose_the_second(autocommit: bool) -> None:
        commits[0] += autocommit
        if autocommit and commits[0] == 2:
            raise OperationalError(2013, "Lost connection to server during query")
        switch(autocommit)

    monkeypatch.setattr(connection, "_set_autocommit", lose_the_second)
    with transaction.atomic():
        operations.change_delay(UNPAID, timedelta(hours=2), mode="recompute", by=BY)
    assert commits[0] > 1
    with transaction.atomic():
        Order.objects.filter(pk=order.pk).update(note="paid by card")
    connection.close()
    order.refresh_from_db()
    assert order.note == "paid by card", "the transaction was committed"


def commit_late(order: Order, **values: Any) -> None:
    """As if the transaction that scheduled it had been open during the change, and had read 30 minutes."""
    assert order.created_at is not None
    due_at = order.created_at + 30 * MINUTE
    values = {"due_at": due_at, "run_at": due_at, "first_due_at": due_at, "ready_at": None, **values}
    Timeout.objects.filter(object_id=str(order.pk)).update(**values)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
@pytest.mark.parametrize("mode", ["recompute", "shift"])
def test_rows_of_a_transaction_that_was_open_during_a_change_are_moved_once(mode: Any) -> None:
    orders: list[Order] = []
    with another_session(lambda: orders.append(unpaid())):
        orders.append(unpaid())
        assert operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode=mode).moved == 1
    assert [waits(order) for order in orders] == [30 * MINUTE, 45 * MINUTE]
    for moved in (1, 0):
        with clock.set_to(timezone.now() + (2 if moved else 4) * MINUTE):
            assert move_missed(connection.alias) == moved
    assert [waits(order) for order in orders] == [45 * MINUTE] * 2
    assert said(pending_timeouts(orders[0]).get()) == [("replanned", BY, "")]
    assert PolicyChange.objects.get().moved == 2


def test_rows_that_a_change_missed_are_moved_in_pages_by_one_worker_a_minute(pages_of: PagesOf) -> None:
    pages_of(2)
    orders = [unpaid() for _ in range(5)]
    operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")
    assert operations.continue_moves(connection.alias) == 0, "it is finished, and does not run again"
    assert {waits(order) for order in orders} == {45 * MINUTE}
    for order in orders:
        commit_late(order)
    assert move_missed(connection.alias) == 0, "the change has just ended"
    with clock.set_to(timezone.now() + 2 * MINUTE):
        assert move_missed(connection.alias) == 5
        commit_late(orders[0])
        assert move_missed(connection.alias) == 0, "another worker has just moved them"
    with clock.set_to(timezone.now() + 4 * MINUTE):
        assert move_missed(connection.alias) == 1
        commit_late(orders[0])
    with clock.set_to(timezone.now() + 11 * MINUTE):
        assert move_missed(connection.alias) == 0
    assert [waits(order) for order in orders] == [30 * MINUTE, *[45 * MINUTE] * 4]


@pytest.mark.parametrize("modes", [["shift"], ["keep"], ["shift", "keep"]], ids=["moved by hand", "kept", "followed"])
def test_what_a_change_was_not_about_is_not_taken_for_missed(modes: list[Any]) -> None:
    by_hand, extended, plain = unpaid(), unpaid(), unpaid()
    for number, mode in enumerate(modes):
        operations.change_delay(UNPAID, (45 + 5 * number) * MINUTE, by=BY, mode=mode)
    assert by_hand.created_at is not None
    reschedule_timeout(by_hand, "cancel_unpaid", at=by_hand.created_at + 30 * MINUTE)
    commit_late(extended)
    extend_timeout(extended, "cancel_unpaid", minutes=1)
    after = unpaid()
    for order in (after, *([] if modes == ["shift"] else [plain])):
        commit_late(order)
    with clock.set_to(timezone.now() + 2 * MINUTE):
        assert move_missed(connection.alias) == 0
    assert [waits(order) for order in (by_hand, extended, after)] == [30 * MINUTE, 31 * MINUTE, 30 * MINUTE]


def test_until_a_change_has_moved_its_rows_another_one_is_refused_and_what_is_scheduled_is_left_alone() -> None:
    earlier, later = unpaid(), Order.objects.create(status="new")
    before = pending_timeouts(earlier).get().due_at
    with transaction.atomic():
        operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")  # its rows are moved after the commit
        row = schedule_timeout(later, "cancel_unpaid", minutes=20)
        for refused in (operations.pause, operations.hold):
            with pytest.raises(operations.PolicyConflict, match="still moving"):
                refused(UNPAID, by=BY)
    assert changes() == [("delay", BY, "")]
    assert pending_timeouts(earlier).get().due_at == before + 15 * MINUTE
    assert pending_timeouts(later).get().due_at == row.due_at
    assert operations.pause(UNPAID, by=BY) is not None


def test_a_stop_by_another_process_is_seen_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    assert REMIND not in stop_cache.recent(connection.alias).stopped
    with monkeypatch.context() as patched:  # as in a process that does not hear of it
        patched.setattr(type(stop_cache), "forget", lambda self: None)
        operations.pause(REMIND, by=BY)
    now = time.monotonic()
    monkeypatch.setattr("django_delayq.ledger.controls.time.monotonic", lambda: now + 1.1)
    assert REMIND in stop_cache.recent(connection.alias).stopped
