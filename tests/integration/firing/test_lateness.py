"""Lateness counts from when a timeout could fire: not from before it was armed, nor during a snooze."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import policy_statuses
from django_delayq.operations import change_delay, retry
from tests.integration.firing.conftest import due, fire
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)
KINDS = pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}])


def was_due(row: Timeout, ago: timedelta, **values: Any) -> Timeout:
    at = timezone.now() - ago
    Timeout.objects.filter(pk=row.pk).update(**{"due_at": at, "run_at": at, "created_at": at - HOUR, **values})
    row.refresh_from_db()
    return row


def measured(
    row: Timeout, caplog: pytest.LogCaptureFixture, event: str = "timeout_fired"
) -> tuple[float, float, float]:
    """Return the lateness of the row, of the status, and of the last line of the log, in hours."""
    row.refresh_from_db()
    [status] = [each for each in policy_statuses() if each.label == row.policy]
    [*_, line] = [record for record in caplog.records if vars(record).get("event") == event]
    seconds = row.lateness(), status.lag_p99, vars(line)["late_seconds"]
    return tuple(round((each or 0) / 3600, 1) for each in seconds)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_delayq.firing")


@KINDS
def test_it_counts_from_the_deadline(
    declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    row = was_due(due(Order.objects.create(), declare(Order, name="plain", **options)), 3 * HOUR)
    fire(row)
    assert measured(row, caplog) == (3, 3, 3)


def test_a_snooze_before_it_was_replaced_does_not_hide_lateness(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    order, policy = Order.objects.create(), declare(Order, name="replaced")
    due(order, policy)
    Timeout.objects.update(ready_at=timezone.now() + 10 * HOUR)  # the end of its snooze
    row = was_due(due(order, policy), 3 * HOUR)
    fire(row)
    assert measured(row, caplog) == (3, 3, 3)


@KINDS
def test_a_snooze_is_not_lateness(declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]) -> None:
    """Quiet hours of ten hours must not make an alert ask for more workers."""
    snoozes = iter([dq.Snooze(seconds=1)])

    def quiet(*_: Any) -> None:
        if asked := next(snoozes, None):
            raise asked

    row = was_due(due(Order.objects.create(), declare(Order, quiet, name="quiet", **options)), 10 * HOUR)
    fire(row)
    row.refresh_from_db()
    assert (row.state, row.attempts) == ("pending", 0)
    ended_at = timezone.now() - 2 * HOUR
    Timeout.objects.filter(pk=row.pk).update(run_at=ended_at, ready_at=ended_at)
    fire(row)
    assert measured(row, caplog) == (2, 2, 2)
    [event] = [event for event in dq.explain_timeout(row) if event.what == "fired"]
    assert "10 h after the deadline" in str(event) and event.details["late"] > 9 * 3600, (
        "the story counts from the deadline"
    )


@KINDS
def test_a_timeout_that_was_armed_after_its_deadline_is_late_from_then_on(
    declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    row = due(Order.objects.create(), declare(Order, name="plain", **options))
    fire(was_due(row, 50 * HOUR, created_at=timezone.now() - HOUR))
    assert measured(row, caplog) == (1, 1, 1)


@KINDS
def test_attempts_that_fail_are_lateness(
    declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    errors = iter([LookupError("first"), LookupError("second")])

    def fail(*_: Any) -> None:
        if error := next(errors, None):
            raise error

    policy = declare(Order, fail, name="fails", retry=dq.Retry([0, 0]), **options)
    row = was_due(due(Order.objects.create(), policy), 3 * HOUR)
    for _ in range(2):
        fire(row)
        [*_, line] = [record for record in caplog.records if vars(record).get("event") == "timeout_failed"]
        assert round(vars(line)["late_seconds"] / 3600, 1) == 3
    fire(row)
    assert measured(row, caplog) == (3, 3, 3)


def test_what_an_operator_retries_is_late_from_then_on(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    refusals = iter([dq.GiveUp("not yet")])

    def give_up(*_: Any) -> None:
        if refusal := next(refusals, None):
            raise refusal

    row = was_due(due(Order.objects.create(), declare(Order, give_up, name="stuck")), 48 * HOUR)
    fire(row)
    retry(Timeout.objects.filter(pk=row.pk), by="admin:alice")
    fire(row)
    assert measured(row, caplog) == (0, 0, 0)


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
    assert measured(row, caplog) == (0, 0, 0)


@KINDS
def test_a_snooze_before_a_failure_is_not_lateness_either(
    declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    raised = iter([dq.Snooze(seconds=0.001), LookupError("no")])

    def handler(*_: Any) -> None:
        if error := next(raised, None):
            raise error

    policy = declare(Order, handler, name="both", retry=dq.Retry([0]), **options)
    row = was_due(due(Order.objects.create(), policy), 10 * HOUR)
    for _ in range(3):
        Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now())
        fire(row)
    assert measured(row, caplog) == (0, 0, 0)
