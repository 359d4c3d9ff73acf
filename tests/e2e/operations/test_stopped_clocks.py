"""A real worker ends holds by hand at their time, and notices `hold_when` after an outage."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest

from django_delayq import hold_timeout, schedule_timeout
from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from tests.e2e.operations.conftest import end
from tests.support.processes import StartWorker
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.django_db(transaction=True)]
SECOND = timedelta(seconds=1)


def held_orders(count: int, seconds: float) -> list[Timeout]:
    """Return timeouts that had some of two seconds left, and are held for so many seconds."""
    rows = list[Timeout]()
    for _ in range(count):  # one after the other: on a busy machine the first would be due before the last is there
        row = schedule_timeout(Order.objects.create(status="new"), "remind", seconds=2)
        held = hold_timeout(row, until=database_now("default") + seconds * SECOND)
        assert held is not None
        rows.append(held)
    return rows


def all_fired(rows: list[Timeout]) -> bool:
    return Timeout.objects.filter(pk__in=[row.pk for row in rows], state="fired").count() == len(rows)


def judge(rows: list[Timeout]) -> None:
    """Check that each fired once, and not before the end of its hold and the rest of its time."""
    for row in rows:
        before, after = row, Timeout.objects.get(pk=row.pk)
        (held,) = [event for event in after.history if event["what"] == "held"]
        (resumed,) = [event for event in after.history if event["what"] == "resumed"]
        assert after.settled_at is not None
        assert after.settled_at >= after.due_at > before.due_at
        assert after.restarted_at is not None
        assert (after.due_at - after.restarted_at).total_seconds() == pytest.approx(held["rest"])
        assert after.restarted_at.isoformat() == held["until"]
        assert resumed["at"] >= held["until"]
    assert Effect.objects.filter(what="remind").count() == len(rows)


def test_a_worker_ends_holds_at_their_time(start_worker: StartWorker, source: dict[str, str]) -> None:
    rows = held_orders(20, 3)
    worker = start_worker(seconds={"SWEEP_INTERVAL": 0.5}, **source)
    wait_until(lambda: all_fired(rows), "all have fired")
    judge(rows)
    end(worker)


def test_workers_that_are_killed_meanwhile_end_each_hold_once(
    start_worker: StartWorker, source: dict[str, str]
) -> None:
    rows = held_orders(200, 2)
    for _ in range(4):
        worker = start_worker(seconds={"SWEEP_INTERVAL": 0.2}, **source)
        wait_until(lambda: Timeout.objects.exclude(state="held").exists(), "some clocks run")
        worker.send_signal(signal.SIGKILL)
        worker.wait(60)
    last = start_worker(seconds={"SWEEP_INTERVAL": 0.5, "LEASE": 2.0}, **source)
    wait_until(lambda: all_fired(rows), "all have fired", 90)
    judge(rows)
    end(last)


def test_a_burst_ends_holds_first(start_worker: StartWorker, source: dict[str, str]) -> None:
    rows = held_orders(3, 1)
    last = max(row.held_until for row in rows if row.held_until)
    wait_until(lambda: database_now("default") > last + 2 * SECOND, "the holds and the rest of their time are over")
    worker = start_worker("--burst", **source)
    assert worker.wait(60) == 0
    assert all_fired(rows)
