"""A change of delay moves the timeouts that were pending when it was requested, once, and no later ones."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_delayq import operations, pending_timeouts, schedule_timeout
from django_delayq.ledger.controls import policy_state, stop_cache
from django_delayq.models import PolicyChange
from tests.integration.operations.conftest import BY
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE = timedelta(minutes=1)
UNPAID = "testapp.order.cancel_unpaid"


def unpaid() -> Order:
    return Order.objects.create(status="unpaid", created_at=timezone.now())


def test_a_finished_change_does_not_run_again() -> None:
    order = unpaid()
    operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="shift")
    due_at = pending_timeouts(order).get().due_at
    assert operations.continue_moves(connection.alias) == 0
    assert pending_timeouts(order).get().due_at == due_at
    assert PolicyChange.objects.get().finished_at is not None


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
    assert "testapp.order.remind" not in stop_cache.cached(connection.alias)
    with monkeypatch.context() as patched:  # as in a process that does not hear of it
        patched.setattr(type(stop_cache), "forget", lambda self: None)
        operations.pause("testapp.order.remind", by=BY)
    now = time.monotonic()
    monkeypatch.setattr("django_delayq.ledger.controls.time.monotonic", lambda: now + 1.1)
    assert "testapp.order.remind" in stop_cache.cached(connection.alias)
