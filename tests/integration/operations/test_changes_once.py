"""A change of delay moves the timeouts that were pending when it was requested, once, and no later ones."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.utils import timezone

from django_delayq import (
    clock,
    extend_timeout,
    operations,
    pending_timeouts,
    reschedule_timeout,
    schedule_timeout,
)
from django_delayq.ledger.controls import policy_state, stop_cache
from django_delayq.ledger.paging import newest_id
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations.changes import PolicyConflict, move_missed, time_limit
from tests.integration.firing.conftest import another_session, in_another_thread
from tests.integration.operations.conftest import BY, said
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

MINUTE = timedelta(minutes=1)
UNPAID = "testapp.order.cancel_unpaid"


def unpaid() -> Order:
    return Order.objects.create(status="unpaid", created_at=timezone.now())


def test_a_connection_that_is_lost_in_a_move_after_the_commit_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    while operations.continue_moves("default"):
        pass
    row = pending_timeouts(order).get()
    assert row.since_at is not None and row.due_at == row.since_at + timedelta(hours=2)


@pytest.mark.skipif(connection.vendor != "mysql", reason="elsewhere an older view is refused, or there is none")
def test_an_older_view_does_not_hide_a_change_that_still_moves_rows() -> None:
    """REPEATABLE READ on MySQL and MariaDB, in the caller's transaction: plain reads show what it has seen first."""
    unpaid()
    operations.hold(UNPAID, by=BY)
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    options["isolation_level"] = "repeatable read"
    try:
        with transaction.atomic():
            assert not PolicyChange.objects.filter(finished_at=None).exists()
            in_another_thread(lambda: operations.resume(UNPAID, by=BY, progress=time_limit(-1.0)))
            with pytest.raises(PolicyConflict):
                operations.resume(UNPAID, by=BY)
    finally:
        connection.close()
        del options["isolation_level"]
    assert PolicyControl.objects.get().stop == "releasing"


def test_a_finished_change_does_not_run_again() -> None:
    order = unpaid()
    operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")
    due_at = pending_timeouts(order).get().due_at
    assert operations.continue_moves(connection.alias) == 0
    assert pending_timeouts(order).get().due_at == due_at
    assert PolicyChange.objects.get().finished_at is not None


def due_after(order: Order) -> timedelta:
    assert order.created_at is not None
    return pending_timeouts(order).get().due_at - order.created_at


def commit_late(order: Order, **values: Any) -> None:
    """As if the transaction that scheduled it had been open during the change, and had read 30 minutes."""
    assert order.created_at is not None
    due_at = order.created_at + 30 * MINUTE
    values = {"due_at": due_at, "run_at": due_at, "first_due_at": due_at, "ready_at": None, **values}
    Timeout.objects.filter(object_id=str(order.pk)).update(**values)


def later(length: timedelta = 2 * MINUTE) -> AbstractContextManager[None]:
    return clock.set_to(timezone.now() + length)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
@pytest.mark.parametrize("mode", ["recompute", "shift"])
def test_rows_of_a_transaction_that_was_open_during_a_change_are_moved_once(mode: Any) -> None:
    orders: list[Order] = []
    with another_session(lambda: orders.append(unpaid())):
        orders.append(unpaid())
        assert operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode=mode).moved == 1
    assert [due_after(order) for order in orders] == [30 * MINUTE, 45 * MINUTE]
    for moved in (1, 0):
        with later(2 * MINUTE if moved else 4 * MINUTE):
            assert move_missed(connection.alias) == moved
    assert [due_after(order) for order in orders] == [45 * MINUTE] * 2
    assert said(pending_timeouts(orders[0]).get()) == [("replanned", BY, "")]
    assert PolicyChange.objects.get().moved == 2


def test_rows_that_a_change_missed_are_moved_in_pages_by_one_worker_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    orders = [unpaid() for _ in range(5)]
    operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")
    for order in orders:
        commit_late(order)
    assert move_missed(connection.alias) == 0, "the change has just ended"
    with later():
        assert move_missed(connection.alias) == 5
        commit_late(orders[0])
        assert move_missed(connection.alias) == 0, "another worker has just moved them"
    with later(4 * MINUTE):
        assert move_missed(connection.alias) == 1
        commit_late(orders[0])
    with later(11 * MINUTE):
        assert move_missed(connection.alias) == 0
    assert [due_after(order) for order in orders] == [30 * MINUTE, *[45 * MINUTE] * 4]


def test_what_is_scheduled_while_the_delay_is_being_changed_has_the_new_one(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, order = declare(Order, name="soon", after=30 * MINUTE), Order.objects.create()

    def scheduled_just_then(using: str) -> int:
        found = newest_id(using)
        schedule_timeout(order, policy)
        return found

    monkeypatch.setattr("django_delayq.operations.policies.newest_id", scheduled_just_then)
    operations.change_delay(policy, 45 * MINUTE, by=BY, mode="recompute")
    row = Timeout.objects.get()
    assert row.due_at - row.created_at == 45 * MINUTE


def test_rows_without_since_that_a_change_missed_are_moved(declare: Any) -> None:
    policy, order = declare(Order, name="soon", after=30 * MINUTE), Order.objects.create()
    row = schedule_timeout(order, policy)
    operations.change_delay(policy, 45 * MINUTE, by=BY, mode="recompute")
    Timeout.objects.update(due_at=row.due_at, run_at=row.due_at, ready_at=None)
    with later():
        assert move_missed(connection.alias) == 1
    row = Timeout.objects.get()
    assert row.due_at - row.created_at == 45 * MINUTE


def test_what_was_moved_by_hand_or_scheduled_after_a_change_is_not_taken_for_missed() -> None:
    by_hand, extended = unpaid(), unpaid()
    operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")
    assert by_hand.created_at is not None
    reschedule_timeout(by_hand, "cancel_unpaid", at=by_hand.created_at + 30 * MINUTE)
    commit_late(extended)
    extend_timeout(extended, "cancel_unpaid", minutes=1)
    after = unpaid()
    commit_late(after)
    with later():
        assert move_missed(connection.alias) == 0
    assert [due_after(order) for order in (by_hand, extended, after)] == [30 * MINUTE, 31 * MINUTE, 30 * MINUTE]


@pytest.mark.parametrize("again", [False, True])
def test_a_change_that_keeps_deadlines_or_was_followed_by_another_one_has_missed_nothing(again: bool) -> None:
    order = unpaid()
    operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift" if again else "keep")
    if again:
        operations.change_delay(UNPAID, 50 * MINUTE, by=BY)
    commit_late(order)
    with later():
        assert move_missed(connection.alias) == 0
    assert due_after(order) == 30 * MINUTE


def test_what_is_scheduled_after_the_change_and_before_its_move_is_left_alone() -> None:
    earlier, later = unpaid(), Order.objects.create(status="new")
    before = pending_timeouts(earlier).get().due_at
    with transaction.atomic():
        operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")
        row = schedule_timeout(later, "cancel_unpaid", minutes=20)
    assert pending_timeouts(earlier).get().due_at == before + 15 * MINUTE
    assert pending_timeouts(later).get().due_at == row.due_at


def test_until_an_earlier_change_has_moved_all_rows_another_one_is_refused() -> None:
    order = unpaid()
    before = pending_timeouts(order).get().due_at
    with transaction.atomic():
        operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")  # its rows are moved after the commit
        for refused in (operations.pause, operations.hold):
            with pytest.raises(operations.PolicyConflict, match="still moving"):
                refused(UNPAID, by=BY)
    assert [change.what for change in PolicyChange.objects.all()] == ["delay"]
    assert not policy_state(UNPAID, connection.alias).is_stopped
    assert pending_timeouts(order).get().due_at == before + 15 * MINUTE
    assert operations.pause(UNPAID, by=BY) is not None


def test_a_stop_by_another_process_is_seen_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "testapp.order.remind" not in stop_cache.recent(connection.alias).stopped
    with monkeypatch.context() as patched:  # as in a process that does not hear of it
        patched.setattr(type(stop_cache), "forget", lambda self: None)
        operations.pause("testapp.order.remind", by=BY)
    now = time.monotonic()
    monkeypatch.setattr("django_delayq.ledger.controls.time.monotonic", lambda: now + 1.1)
    assert "testapp.order.remind" in stop_cache.recent(connection.alias).stopped
