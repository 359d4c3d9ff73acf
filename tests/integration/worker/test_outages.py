"""Servers go away and come back: nothing is lost, nothing is fired twice, and the log stays short."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection, transaction
from pytest_django import Settings

from django_delayq import schedule_timeout
from django_delayq.engine.records import turn_key
from django_delayq.engine.wakeup import Wakeup
from django_delayq.firing import plan
from django_delayq.ledger import outbox
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine, get_engine
from django_delayq.sql.now import database_now
from django_delayq.worker import Worker, sweep
from django_delayq.worker.sources.redis import Sources
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, cut_all_other_connections, due_orders, events, states
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
AWAY_AND_BACK = ["redis_away", "redis_back"]


def test_what_was_committed_long_after_its_deadline_is_found(
    start_worker: StartWorker, own_redis: RedisProcess
) -> None:
    rows = due_orders("remind", 3, hours=2)
    start_worker()
    engine = get_engine("default")
    assert engine is not None
    turn = turn_key(engine.prefix, "full-sweep")
    with own_redis.client() as client:
        wait_until(lambda: client.exists(turn))
        # As after a transaction that lasted five minutes: overdue by more than the quick sweep reads.
        Timeout.objects.update(run_at=rows[0].created_at - timedelta(minutes=5))
        client.delete(turn)  # a minute passes
    wait_until(all_are("fired"))


@pytest.mark.parametrize("way", ["refused", "black hole"])
def test_without_redis_the_ledger_is_read_until_it_is_back(
    start_worker: StartWorker, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    start_worker()
    due_orders("remind", 5)
    wait_until(all_are("fired"))
    is_refused = way == "refused"
    (own_redis.kill if is_refused else own_redis.pause)()
    due_orders("remind", 5)
    due_orders("remind", 5, seconds=0.5)
    wait_until(all_are("fired"))
    assert "redis_away" in events(caplog)
    (own_redis.start if is_refused else own_redis.resume)()
    wait_until(lambda: events(caplog) == AWAY_AND_BACK)
    forget_engine()  # or the producers' breaker would leave the next ones to the sweep
    due_orders("remind", 5)
    wait_until(all_are("fired"))
    assert Effect.objects.count() == 20
    assert events(caplog) == AWAY_AND_BACK


def test_a_worker_that_starts_without_redis_goes_over_to_it(
    start_worker: StartWorker, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.kill()
    due_orders("remind", 5)
    start_worker()
    wait_until(all_are("fired"))
    own_redis.start()
    wait_until(lambda: events(caplog) == AWAY_AND_BACK)


class Failing:
    """Wraps a function and raises the database's error a few times."""

    def __init__(self, function: Callable[..., Any], times: int) -> None:
        self.function, self.left = function, times

    def __call__(self, *arguments: Any) -> Any:
        if self.left:
            self.left -= 1
            raise OperationalError("the server closed the connection")
        return self.function(*arguments)


@pytest.mark.usefixtures("without_redis")
def test_a_database_that_fails_is_asked_again_and_told_of_once(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(plan, 2)
    monkeypatch.setattr("django_delayq.worker.dispatch.plan", failing)
    due_orders("remind", 5)
    start_worker()
    wait_until(all_are("fired"))
    assert failing.left == 0
    assert Effect.objects.count() == 5
    told = events(caplog)
    assert told == ["database_away", "database_back"] * (len(told) // 2)


@pytest.mark.usefixtures("source")
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no connections that break")
def test_connections_that_the_database_cuts_are_opened_again(start_worker: StartWorker) -> None:
    start_worker()
    due_orders("remind", 5)
    wait_until(all_are("fired"))
    for _ in range(3):
        cut_all_other_connections()
        wait_until(can_read)  # PgBouncer may give the test a session that has just ended
        due_orders("remind", 10)
        wait_until(all_are("fired"))
    assert Effect.objects.count() == 35
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}
    assert states() == {"fired": 35}


def can_read() -> bool:
    try:
        return Timeout.objects.exists()
    except DatabaseError:
        connection.close()
        return False


@pytest.mark.skipif(connection.vendor == "sqlite", reason="one transaction that writes stops every other there")
def test_what_is_committed_minutes_after_its_own_deadline_and_is_never_pushed_is_found_by_the_full_sweep(
    start_worker: StartWorker, own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is older than the quick sweep reads, and its push was lost, for example in a process that died."""
    monkeypatch.setattr(sweep, "OVERDUE_BY", timedelta(milliseconds=100))
    monkeypatch.setattr(sweep, "FULL_INTERVAL", timedelta(seconds=1))
    monkeypatch.setattr(outbox, "_send", lambda *_: None)
    start_worker()
    order = Order.objects.create(status="new")
    with transaction.atomic():
        row = schedule_timeout(order, "remind", seconds=0.1)
        wait_until(lambda: database_now("default") > row.due_at + timedelta(seconds=1))
    wait_until(all_are("fired"))


@pytest.mark.usefixtures("without_redis")
@pytest.mark.parametrize("away", ["worker.servers.DatabaseHealth.check", "ledger.installation.ledger_name"])
def test_a_burst_gives_up_while_the_database_is_away(
    away: str, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """Also one that cannot begin: otherwise the processes that cron starts pile up."""
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "production"}
    due_orders("remind", 5)
    monkeypatch.setattr("django_delayq.worker.loop.BURST_AWAY_SECONDS", 0.5)
    monkeypatch.setattr(f"django_delayq.{away}", Failing(plan, 10**6))
    with pytest.raises(SystemExit) as ended:
        call_command("delayq_worker", "--burst", verbosity=0)
    assert ended.value.code == 1
    assert states() == {"pending": 5}


def test_a_worker_waits_after_a_pass_that_fails_before_it_has_taken_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would use a whole core, and connect again and again, until the database is back."""
    worker, waits, flushes = Worker(concurrency=1), list[float](), itertools.count()

    def flush(_: Sources) -> None:
        if next(flushes) == 50:
            worker.stop()
        raise OperationalError("the database is away")

    def wait(_: Wakeup, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 3:
            worker.stop()
        return False

    monkeypatch.setattr(Sources, "flush", flush)
    monkeypatch.setattr(Wakeup, "wait", wait)
    worker.run()
    assert len(waits) >= 3, "it ran 50 passes without waiting"
    assert min(waits) > 0
