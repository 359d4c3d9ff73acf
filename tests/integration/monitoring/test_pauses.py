"""Lateness does not contain a pause of the policy: it counts from the end of the last stop, wherever it is shown."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import clock, signals
from django_delayq.models import Timeout
from django_delayq.monitoring.reports import policy_report
from django_delayq.monitoring.snapshot import policy_statuses, snapshot
from django_delayq.operations import hold, late, pause, resume
from django_delayq.testing import fire_due
from tests.integration.monitoring.rounds import utc
from tests.support.typed import Declare, Log
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
DEADLINE = utc(2026, 5, 10, 12)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
BY: dict[str, Any] = {"by": "test"}
UNSHIFTED = {**BY, "shift": False}


def at(hours: float) -> Any:
    """`hours` after the deadline."""
    return DEADLINE + hours * HOUR


def until(hours: float) -> dict[str, Any]:
    return {**BY, "until": at(hours)}


def done(policy: dq.TimeoutPolicy[Any], *changes: tuple[float, Callable[..., Any], dict[str, Any]]) -> Timeout:
    """Schedule a timeout, and change the policy at these hours after its deadline."""
    with clock.set_to(DEADLINE - DAY):
        row = dq.schedule_timeout(Order.objects.create(), policy, at=DEADLINE)
    for hours, change, arguments in changes:
        with clock.set_to(at(hours)):
            change(policy, **arguments)
    return row


def measured(policy: dq.TimeoutPolicy[Any], row: Timeout, fires: float, caplog: Any) -> list[float]:
    """Fire the timeout; return its lateness in hours: of the row, the signal, the log, the status, and a report."""
    caplog.set_level(logging.INFO, "django_delayq.firing")
    sent = list[float | None]()

    def note(timeout: Timeout, **_: object) -> None:
        sent.append(timeout.lateness())

    signals.timeout_fired.connect(note)
    with clock.set_to(at(fires)):
        fire_due(policy)
        row.refresh_from_db()
        [status] = [each for each in policy_statuses() if each.label == row.policy]
        total = policy_report(row.policy, last=DEADLINE.date() + DAY).total
    signals.timeout_fired.disconnect(note)
    [*_, line] = [each for each in caplog.records if vars(each).get("event") == "timeout_fired"]
    found = row.lateness(), *sent, vars(line)["late_seconds"], status.lag_p99, total.late_p99
    return [round((each or 0) / 3600, 1) for each in found]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        *((options, [(-1, pause, until(1)), (1.5, 0.5)]) for options in ({}, {"atomic": False}, {"batch": 5})),
        ({}, [(1, pause, BY), (3, resume, BY), (3.5, 0.5)]),
        ({}, [(-1, pause, until(1)), (0, pause, until(2)), (1.5, hold, BY), (2.5, resume, UNSHIFTED), (3, 0.5)]),
        ({}, [(-1, pause, until(1)), (1.25, late, {**BY, "after": DAY}), (1.5, 0.5)]),
        ({}, [(-1, pause, until(1)), (1.25, pause, BY), (2, resume, BY), (2.5, 0.5)]),
        ({}, [(-3, pause, BY), (-1, resume, BY), (2, 2)]),
    ],
)
def test_lateness_counts_from_the_end_of_the_last_stop(
    declare: Declare, caplog: Log, options: dict[str, Any], changes: Any
) -> None:
    *stops, (fires, expected) = changes
    policy = declare(Order, name="told", **options)
    assert measured(policy, done(policy, *stops), fires, caplog) == [expected] * 5


def test_what_waits_after_a_pause_waits_since_its_end(declare: Declare) -> None:
    policy = declare(Order, name="told")
    done(policy, (-1, pause, until(1)))
    with clock.set_to(at(0.5)):
        assert snapshot().oldest_overdue_seconds == 0
        assert [each.oldest_due_at for each in policy_statuses() if each.label == policy.label] == [DEADLINE]
    with clock.set_to(at(1.5)):
        assert snapshot().oldest_overdue_seconds == pytest.approx(1800, abs=1)
        resume(policy, **BY)
        pause(policy, **BY)
    with clock.set_to(at(3)):
        resume(policy, **BY)
        assert snapshot().oldest_overdue_seconds == pytest.approx(0, abs=1)
