"""Periodic jobs and the main loop after errors: they reconnect, retry soon, and name what failed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
from django.db import Error as DatabaseError
from django.db import OperationalError, connection, connections
from pytest_django import Settings

from django_delayq.arming import scan
from django_delayq.arming import sync as sync_module
from django_delayq.backoff import Backoff
from django_delayq.firing import plan
from django_delayq.ledger.db_connections import check_connections, needs_new_connection
from django_delayq.models import WorkerSeen
from django_delayq.redis_clients import get_worker_engine
from django_delayq.worker import Worker, background
from django_delayq.worker.background import Background, Job, PeriodicThread
from tests.settings import POOL, POOLER
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events

pytestmark = pytest.mark.django_db(transaction=True)
MINUTE = timedelta(minutes=1)
own_session = pytest.mark.skipif(bool(POOL or POOLER), reason="another thread or client gets the session next")


def in_a_thread(step: Callable[[], object]) -> None:
    """Run `step` in a thread, whose connections are its own."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as error:
            failed.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if failed:
        raise failed[0]


def make_read_only() -> None:
    """Have this thread's open connection refuse writes, as one to a primary that was demoted does."""
    statements = {
        "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "mysql": "SET SESSION TRANSACTION READ ONLY",
        "sqlite": "PRAGMA query_only = 1",
    }
    with connection.cursor() as cursor:
        cursor.execute(statements[connection.vendor])


def write() -> None:
    WorkerSeen.objects.filter(pk="").update(held=0)


def away(*_: object, **__: object) -> Any:
    raise OperationalError("the server closed the connection")


@own_session
@pytest.mark.dialect
def test_a_job_on_a_connection_that_became_read_only_opens_another_one() -> None:
    written: list[bool] = []

    def work() -> None:
        write()
        written.append(True)
        if len(written) == 1:
            make_read_only()

    def run() -> None:
        job = Job.every(MINUTE, "test", work)
        job.run()
        job.run()
        assert job.seconds_left > 30, "the second run has succeeded"
        make_read_only()
        with pytest.raises(DatabaseError) as caught:
            write()
        assert needs_new_connection(caught.value)
        check_connections(error=caught.value)
        write()

    in_a_thread(run)
    assert len(written) == 2
    assert not needs_new_connection(OperationalError("the server closed the connection"))
    assert not needs_new_connection(ZeroDivisionError())


@own_session
@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")
def test_a_job_whose_connection_was_cut_while_idle_does_not_fail(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        job = Job.every(MINUTE, "test", write)
        job.run()
        cut_this_connection()
        job.run()
        assert 30 < job.seconds_left <= 60, "it succeeded"

    in_a_thread(run)
    assert events(caplog) == []


def cut_this_connection() -> None:
    """Have the server cut this thread's connection, through another one."""
    is_postgresql = connection.vendor == "postgresql"
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()" if is_postgresql else "SELECT CONNECTION_ID()")
        (number,) = cursor.fetchone()
    kill = f"SELECT pg_terminate_backend({number})" if is_postgresql else f"KILL {number}"
    in_a_thread(lambda: connection.cursor().execute(kill))


@pytest.mark.parametrize("work", [away, sys.exit], ids=["the database fails", "code of the project exits"])
def test_a_job_that_failed_is_retried_after_one_two_and_four_seconds(
    caplog: pytest.LogCaptureFixture, work: Callable[[], object]
) -> None:
    """Python ends a thread silently after SystemExit. The worker would run without its sync, or its sweep."""
    job = Job.every(MINUTE, "test", work)
    for longest in (1, 2, 4, 8):
        job.run()
        assert longest / 2 - 0.4 < job.seconds_left <= longest
    for _ in range(5):
        job.run()
    assert 30 - 5 < job.seconds_left <= 60, "and never more often than its own interval in the end"
    assert events(caplog) == ["background_failed"]


@pytest.mark.parametrize("lease", [6, 60])
def test_leases_are_extended_soon_after_an_outage_and_soon_again_while_a_row_is_locked(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, lease: int
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(seconds=lease)}
    answers: list[bool] = []
    monkeypatch.setattr(background, "extend_firing", lambda *_: answers.pop() if answers else away())
    job = background.leases_job(MagicMock(), MagicMock(), "default")
    for _ in range(8):
        job.run()
        assert job.seconds_left <= min(5, lease / 3), "the lease does not expire before the next try"
    answers += [True, False]
    job.run()
    assert job.seconds_left <= 1, "a row is locked"
    job.run()
    assert lease / 3 - 0.5 < job.seconds_left <= lease / 3


def test_after_an_outage_of_the_database_the_sweep_is_back_as_soon_as_the_main_loop(
    monkeypatch: pytest.MonkeyPatch, with_redis: Any
) -> None:
    """It reads ten seconds ahead. What falls due after a longer outage, from beyond the horizon, waits for it."""
    monkeypatch.setattr("django_delayq.worker.sweep.Sweep.run_once", away)
    worker = Worker()
    worker._connect(get_worker_engine("default"))
    quick, _ = Background(worker).threads(MagicMock(), MagicMock())
    [job] = [job for job in quick.jobs if job.name == "delayq-sweep"]
    for _ in range(8):
        job.run()
        assert 0 < job.seconds_left <= Backoff.longest


def test_a_sync_that_failed_is_retried_soon_and_then_waits_for_its_interval(
    monkeypatch: pytest.MonkeyPatch, with_redis: Any
) -> None:
    synced: list[str] = []

    def steps(policy: Any, *rest: Any) -> Any:
        synced.append(policy.label)
        return scan.steps(policy, *rest) if len(synced) > 1 else away()

    monkeypatch.setattr(sync_module, "steps", steps)
    monkeypatch.setattr(sync_module, "Backoff", partial(Backoff, monotonic=lambda: 0.0))  # a pass may take a second
    tables = Background(Worker()).tables
    tables.run(at_once=True)
    policies = len(sync_module.automatic_policies("default"))
    assert len(set(synced)) == len(synced) == policies, "the others do not wait for the failed one"
    assert tables.run() <= 1.0
    tables._failed[synced[0]].retry_at = 0.0  # a second later
    tables.run(at_once=True)
    assert synced[policies:] == [synced[0]]
    tables.run(at_once=True)
    assert len(synced) == policies + 1, "after a success, not before the next interval"


def test_a_long_job_lets_urgent_ones_run_between_its_pages() -> None:
    ran: list[str] = []
    thread = PeriodicThread("test")

    def sweep() -> None:
        for page in range(3):
            ran.append(f"page {page}")
            wait_until(lambda: not thread.jobs[0].seconds_left)
            thread.run_urgent()
        thread.stop()

    def extend() -> float:
        ran.append("leases")
        return 0.05

    thread.jobs += [Job("leases", extend, begins_in=0.05), Job.every(MINUTE, "sweep", sweep)]
    thread.start()
    thread.join(100)
    assert [each for each in ran if each != "leases"] == ["page 0", "page 1", "page 2"]
    between = ran[ran.index("page 0") : ran.index("page 2")]
    assert between.count("leases") >= 2


@pytest.mark.parametrize("source", ["ledger"], indirect=True)
def test_an_error_that_is_not_the_databases_is_named_once_however_often_it_comes(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    left = [1, 1, 1]

    def fail(*arguments: Any) -> Any:
        if left:
            left.pop()
            raise OSError("the clock cannot be read")
        return plan(*arguments)

    monkeypatch.setattr("django_delayq.worker.dispatch.plan", fail)
    due_orders("remind", 3)
    start_worker()
    wait_until(all_are("fired"))
    wait_until(lambda: events(caplog)[-1] == "pass_succeeded")
    told = [record for record in caplog.records if getattr(record, "event", "") == "pass_failed"]
    assert events(caplog) == ["pass_failed", "pass_succeeded"]
    assert "failed with OSError" in told[0].getMessage()
    assert "the clock cannot be read" in told[0].getMessage()
    assert told[0].exc_info
