"""The jobs of every worker: it syncs, prunes, sweeps, extends its leases; and what each does after an error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
from django.db import OperationalError, connection, connections
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq.arming import scan
from django_delayq.arming import sync as sync_module
from django_delayq.backoff import Backoff
from django_delayq.firing import plan
from django_delayq.ledger.db_connections import needs_new_connection
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.operations import advance_clock
from django_delayq.worker import Worker, background
from django_delayq.worker.background import Background, Job
from tests.settings import POOL, POOLER
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events, queue_in_redis
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

OFTEN, MINUTE, DAY = timedelta(milliseconds=100), timedelta(minutes=1), timedelta(days=1)


@pytest.mark.usefixtures("source")
def test_a_worker_arms_what_saves_did_not_see_deletes_what_is_old_and_settles_what_another_one_died_with(
    start_worker: StartWorker, settings: Settings
) -> None:
    often = {"SWEEP_INTERVAL": OFTEN, "SYNC_INTERVAL": OFTEN}
    settings.DELAYQ = {**settings.DELAYQ, **often, "RETENTION": 3 * DAY, "CATCH_UP": DAY}
    young, old = due_orders("remind", 2)
    for row, days in ((young, 2), (old, 4)):
        then = timezone.now() - days * DAY
        Timeout.objects.filter(pk=row.pk).update(
            state="fired", cause="due", slot_taken=None, settled_at=then, due_at=then, first_due_at=then
        )
    [died] = due_orders("send_outside", hours=1)
    expired: dict[str, Any] = {"state": "firing", "slot_taken": None, "run_at": timezone.now() - MINUTE}
    Timeout.objects.filter(pk=died.pk).update(attempts=1, **expired)
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
    start_worker()
    settled = {(young.policy, "fired"), (died.policy, "fired"), ("testapp.order.cancel_unpaid", "pending")}
    wait_until(lambda: set(Timeout.objects.values_list("policy", "state")) == settled)
    wait_until(lambda: not Timeout.objects.filter(pk=old.pk).exists())
    died.refresh_from_db()
    assert died.attempts == 1, "a death does not count as an attempt"
    assert Timeout.objects.filter(pk=young.pk).exists()


def test_a_lease_lasts_as_long_as_the_setting_and_is_extended(
    start_worker: StartWorker, with_redis: Any, settings: Settings, declare: Any
) -> None:
    begun, end = threading.Event(), threading.Event()

    def handler(*_: object) -> None:
        begun.set()
        assert end.wait(30)

    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(seconds=6)}
    policy = declare(Order, handler, name="endless")
    start_worker()
    # On SQLite the first heartbeat, which the same thread writes, would wait for the transaction of the handler.
    wait_until(WorkerSeen.objects.exists)
    [row] = due_orders(policy)
    assert begun.wait(30)

    def ends_at() -> int:
        return dict(queue_in_redis().peek())[row.pk]

    first = ends_at()
    assert first / 1000 - timezone.now().timestamp() < 6.5
    wait_until(lambda: ends_at() > first or timezone.now().timestamp() * 1000 > first)
    assert timezone.now().timestamp() * 1000 < first, "it expired; the worker has leased it a second time"
    end.set()
    wait_until(all_are("fired"))


@pytest.mark.usefixtures("without_redis")
def test_workers_fire_each_step_before_the_next(start_worker: StartWorker, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging", "PRODUCTION": "production"}
    start_worker()
    order = Order.objects.create()
    for number, name in enumerate(("remind", "linger")):
        dq.schedule_timeout(order, name, days=number + 1)
    done = advance_clock(timedelta(days=3), actor="script:test")
    assert done.is_complete
    rows = {row.policy.rpartition(".")[2]: row for row in Timeout.objects.all()}
    assert {row.state for row in rows.values()} == {"fired"}
    first, second = rows["remind"].settled_at, rows["linger"].settled_at
    assert first is not None and second is not None and first < second


# After errors

own_session = pytest.mark.skipif(bool(POOL or POOLER), reason="another thread or client gets the session next")


def make_read_only() -> None:
    """Have this thread's open connection refuse writes, as one to a primary that was demoted does."""
    statements = {
        "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "mysql": "SET SESSION TRANSACTION READ ONLY",
        "sqlite": "PRAGMA query_only = 1",
    }
    with connection.cursor() as cursor:
        cursor.execute(statements[connection.vendor])


def away(*_: object, **__: object) -> Any:
    raise OperationalError("the server closed the connection")


@own_session
@pytest.mark.dialect
def test_a_job_on_a_connection_that_was_cut_or_became_read_only_opens_another_one() -> None:
    written: list[bool] = []

    def work() -> None:
        WorkerSeen.objects.filter(pk="").update(held=0)
        written.append(True)
        if len(written) == 1:
            make_read_only()

    def run() -> float:
        job = Job.every(MINUTE, "test", work)
        job.run()
        job.run()
        connections.close_all()
        return job.seconds_left

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result(30) > 30, "the second run has succeeded"
    assert len(written) == 2
    assert not needs_new_connection(OperationalError("the server closed the connection"))
    assert not needs_new_connection(ZeroDivisionError())


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


@pytest.mark.usefixtures("without_redis")
def test_an_error_that_is_not_the_databases_is_named_once_however_often_it_comes(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [1, 1]

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
