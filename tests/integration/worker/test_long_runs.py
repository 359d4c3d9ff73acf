"""A handler that takes long is in the log: after a second, with what it waits for, and again when a lease is over.

One that hangs beyond its time limit is given up: the worker continues with new connections, and counts its threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection, transaction
from pytest_django import Settings

import django_delayq as dq
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.monitoring.doctor import examine
from django_delayq.worker import background
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("with_redis")]
LEASE = timedelta(milliseconds=400)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[Any]]:
    """`told("handler_slow")` returns the lines of the log about this event."""
    caplog.set_level(logging.INFO, logger="django_delayq.firing")
    return lambda event: [record for record in caplog.records if getattr(record, "event", "") == event]


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["inside", "outside"])
def test_a_handler_that_outlives_its_lease_is_told_of_and_fired_once(
    start_worker: StartWorker, declare: Callable[..., Any], settings: Settings, told: Any, options: dict[str, Any]
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": LEASE}
    go_on, calls = threading.Event(), []

    def hang(target: Any, timeouts: Any) -> None:
        calls.append(timeouts)
        assert go_on.wait(30)

    policy = declare(Order, hang, name="hangs", **options)
    [row] = due_orders(policy)
    start_worker(concurrency=2)
    try:
        wait_until(lambda: len(told("handler_runs_long")) >= 2)
        wait_until(lambda: told("handler_runs_long")[-1].seconds >= 2 * LEASE.total_seconds())
    finally:
        go_on.set()
    wait_until(all_are("fired"))
    assert len(calls) == Timeout.objects.get().attempts == 1
    for record in told("handler_runs_long"):
        assert record.levelno == logging.WARNING
        assert (record.policy, record.timeout_id, record.timeout_ids) == (policy.label, row.pk, (row.pk,))
        assert f"timeout {row.pk}" in record.getMessage()


def test_a_slow_handler_is_logged_after_a_second_with_its_place(
    start_worker: StartWorker, declare: Callable[..., Any], told: Any
) -> None:
    go_on = threading.Event()

    def hang(*_: object) -> None:
        assert go_on.wait(30)

    policy = declare(Order, hang, name="hangs", atomic=False)
    [row] = due_orders(policy)
    start_worker(concurrency=1)
    try:
        wait_until(lambda: told("handler_slow"))
    finally:
        go_on.set()
    [record] = told("handler_slow")
    assert record.levelno == logging.WARNING, "all threads are busy"
    assert (record.policy, record.timeout_id, record.timeout_ids) == (policy.label, row.pk, (row.pk,))
    assert 1 <= record.seconds < 10
    said = record.getMessage()
    assert "in the handler, at worker/test_long_runs.py:" in said and "in hang" in said


OPTIONS: dict[str, Any] = {"limits": dq.Limits(run=timedelta(milliseconds=200)), "retry": dq.Retry([0])}


@pytest.fixture
def hang() -> Iterator[Callable[..., None]]:
    """A handler that returns only when the test ends: it waits in C."""
    end = threading.Event()

    def handler(*_: object) -> None:
        Order.objects.update(note="never seen")
        end.wait()

    yield handler
    end.set()
    wait_until(lambda: firing_state.stuck_threads == 0, "the abandoned threads have ended")


def is_free() -> bool:
    """Return whether no transaction holds the orders."""
    try:
        with transaction.atomic():
            nowait = connection.features.has_select_for_update_nowait
            return bool(Order.objects.select_for_update(nowait=nowait).count() or True)
    except DatabaseError:
        return False


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no statement that takes its time")
def test_a_statement_that_runs_on_the_server_is_ended_there(
    start_worker: StartWorker, declare: Callable[..., Any]
) -> None:
    """Otherwise the server would notice only at its end that its client is gone, and keep the locks."""

    def handler(*_: object) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            Order.objects.update(note="never seen")
            cursor.execute("SELECT pg_sleep(60)" if connection.vendor == "postgresql" else "SELECT sleep(60)")

    due_orders(declare(Order, handler, name="sleeps", **OPTIONS))
    start_worker(concurrency=2)
    wait_until(all_are("dead"), "it is dead")
    wait_until(is_free, "its locks are released", seconds=30)
    wait_until(lambda: firing_state.stuck_threads == 0, "its threads have ended")


def test_stuck_threads_are_counted_and_too_many_end_the_worker(
    start_worker: StartWorker,
    declare: Callable[..., Any],
    hang: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "HEARTBEAT_INTERVAL", timedelta(seconds=0.1))
    policy = declare(Order, hang, name="hangs", atomic=False, **OPTIONS)
    due_orders(policy)
    running = start_worker(concurrency=1)
    wait_until(lambda: WorkerSeen.objects.filter(stuck_threads=2).exists(), "both are counted")
    [finding] = [each for each in examine(quick=True) if each.id == "workers.stuck_threads"]
    assert (finding.level, "2 threads" in finding.msg) == (logging.WARNING, True)
    call_command("delayq_status", stdout=(shown := StringIO()))
    assert "2 stuck threads" in shown.getvalue()
    due_orders(policy)
    running.join()
    assert running.worker.is_stuck
    assert events(caplog)[-1] == "too_many_stuck"
