"""Lateness counts from when a timeout could fire: not from before it was armed, nor during a snooze."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import policy_statuses
from django_delayq.operations import change_delay, retry
from tests.integration.firing.conftest import LIMITED_MODES, MODES, Declare, due, fire, logged, raising
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_delayq.firing")


def was_due(row: Timeout, ago: timedelta, **values: Any) -> Timeout:
    at = timezone.now() - ago
    Timeout.objects.filter(pk=row.pk).update(**{"due_at": at, "run_at": at, "created_at": at - HOUR, **values})
    row.refresh_from_db()
    return row


def measured(row: Timeout, caplog: pytest.LogCaptureFixture) -> list[float]:
    """Return the lateness of the row, of the status, and of each line of the log, in hours."""
    row.refresh_from_db()
    [status] = [each for each in policy_statuses() if each.label == row.policy]
    lines = [*logged(caplog, "timeout_failed"), *logged(caplog, "timeout_fired")]
    return [round((each or 0) / 3600, 1) for each in (row.lateness(), status.lag_p99, *(x.late_seconds for x in lines))]


@LIMITED_MODES
def test_attempts_that_fail_are_lateness(declare: Declare, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    handler = raising(LookupError("first"), LookupError("second"), None)
    policy = declare(Order, handler, name="fails", retry=dq.Retry([0, 0]), **MODES[mode])
    row = was_due(due(Order.objects.create(), policy), 3 * HOUR)
    for _ in range(3):
        fire(row)
    assert measured(row, caplog) == [3] * 5


@LIMITED_MODES
def test_a_snooze_is_not_lateness(declare: Declare, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """Quiet hours of ten hours must not make an alert ask for more workers."""
    policy = declare(Order, raising(dq.Snooze(seconds=1), None), name="quiet", **MODES[mode])
    row = was_due(due(Order.objects.create(), policy), 10 * HOUR)
    fire(row)
    ended_at = timezone.now() - 2 * HOUR
    Timeout.objects.filter(pk=row.pk).update(run_at=ended_at, ready_at=ended_at)
    fire(row)
    assert measured(row, caplog) == [2] * 3
    [event] = [event for event in dq.explain_timeout(row) if event.what == "fired"]
    assert "10 h after the deadline" in str(event), "the story counts from the deadline"
    assert event.details["late"] > 9 * 3600


@LIMITED_MODES
def test_a_snooze_before_a_failure_is_not_lateness_either(
    declare: Declare, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    handler = raising(dq.Snooze(seconds=0.001), LookupError("no"), None)
    policy = declare(Order, handler, name="both", retry=dq.Retry([0]), **MODES[mode])
    row = was_due(due(Order.objects.create(), policy), 10 * HOUR)
    for _ in range(3):
        Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now())
        fire(row)
    assert measured(row, caplog) == [0] * 4


def test_a_snooze_before_it_was_replaced_does_not_hide_lateness(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    policy = declare(Order, name="replaced")
    due(order, policy)
    Timeout.objects.update(ready_at=timezone.now() + 10 * HOUR)  # the end of its snooze
    row = was_due(due(order, policy), 3 * HOUR)
    fire(row)
    assert measured(row, caplog) == [3] * 3


@LIMITED_MODES
def test_a_timeout_that_was_armed_after_its_deadline_is_late_from_then_on(
    declare: Declare, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    row = due(Order.objects.create(), declare(Order, name="plain", **MODES[mode]))
    fire(was_due(row, 50 * HOUR, created_at=timezone.now() - HOUR))
    assert measured(row, caplog) == [1] * 3


def test_what_an_operator_retries_is_late_from_then_on(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    policy = declare(Order, raising(dq.GiveUp("not yet"), None), name="stuck")
    row = was_due(due(Order.objects.create(), policy), 48 * HOUR)
    fire(row)
    retry(Timeout.objects.filter(pk=row.pk), by="admin:alice")
    fire(row)
    assert measured(row, caplog) == [0] * 3


def test_a_timeout_that_was_moved_to_a_deadline_in_the_past_is_late_from_then_on(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a change of the delay by an operator: thousands of timeouts are due at once."""
    policy = declare(Order, name="moved", after=timedelta(days=9), since="created_at", when=Q(status="unpaid"))
    order = Order.objects.create(status="unpaid", created_at=timezone.now() - 50 * HOUR)
    row = dq.pending_timeouts(order, policy).get()
    Timeout.objects.filter(pk=row.pk).update(created_at=timezone.now() - 49 * HOUR)
    change_delay(policy, timedelta(hours=20), by="admin:alice", mode="recompute")
    row.refresh_from_db()
    assert timezone.now() - row.due_at > 29 * HOUR
    fire(row)
    assert measured(row, caplog) == [0] * 3
