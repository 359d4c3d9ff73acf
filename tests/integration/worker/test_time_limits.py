"""A worker whose handlers hang: it continues with new connections, counts its stuck threads, and ends in time."""

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

import django_delayq as dq
from django_delayq.firing.state import firing_state
from django_delayq.models import WorkerSeen
from django_delayq.monitoring.doctor import examine
from django_delayq.worker import background
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("source")]
OPTIONS: dict[str, Any] = {"limits": dq.Limits(run=timedelta(milliseconds=200)), "retry": dq.Retry([0])}
MODES: dict[str, Any] = {"atomic": {}, "outside": {"atomic": False}, "batch": {"batch": 5}}


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    firing_state.forget()


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


@pytest.mark.parametrize("mode", MODES)
def test_more_handlers_hang_than_there_are_connections_and_others_fire(
    start_worker: StartWorker, declare: Callable[..., Any], hang: Callable[..., None], mode: str
) -> None:
    """With a pool of two, a connection that an abandoned handler kept would stop the worker."""
    options = OPTIONS | MODES[mode] | {"retry": dq.Retry([0, 0])}
    [row] = due_orders(declare(Order, hang, name="hangs", **options))
    start_worker(concurrency=2)
    wait_until(all_are("dead"), "it is dead")
    row.refresh_from_db()
    assert (row.attempts, [each["error"] for each in row.errors]) == (3, ["TimeLimitExceeded"] * 3)
    assert is_free()
    [quick] = due_orders("remind")
    wait_until(lambda: type(quick).objects.filter(pk=quick.pk, state="fired").exists(), "another one fires")


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no statement that takes its time")
@pytest.mark.parametrize("mode", MODES)
def test_a_statement_that_runs_on_the_server_is_ended_there(
    start_worker: StartWorker, declare: Callable[..., Any], mode: str
) -> None:
    """Otherwise the server would notice only at its end that its client is gone, and keep the locks."""

    def handler(*_: object) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            Order.objects.update(note="never seen")
            cursor.execute("SELECT pg_sleep(60)" if connection.vendor == "postgresql" else "SELECT sleep(60)")

    due_orders(declare(Order, handler, name="sleeps", **OPTIONS, **MODES[mode]))
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
