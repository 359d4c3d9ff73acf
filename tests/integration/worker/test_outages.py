"""Servers go away and come back: nothing is lost, nothing is fired twice, and the log stays short."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis
from django.db import OperationalError, connection

from django_delayq.connections import forget_engine, get_engine, get_worker_engine
from django_delayq.exceptions import EngineFull, EngineUnavailable
from django_delayq.firing import plan
from django_delayq.models import Timeout
from django_delayq.recovery.poll import POLL_SECONDS
from django_delayq.worker.link import Link
from django_delayq.worker.transfer import LONGEST_WAIT_SECONDS
from tests.e2e.outages.conftest import once
from tests.e2e.outages.faults import FAULTS
from tests.e2e.outages.wire import Wire
from tests.engine.redis_process import RedisProcess
from tests.integration.worker.running import StartWorker, all_are, due_orders, states, wait_until
from tests.testapp.models import Effect

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def own_redis(settings: Settings) -> Iterator[RedisProcess]:
    """A Redis that the test may stop, with a sweep that is not waited for long."""
    with RedisProcess() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": url, "SWEEP_INTERVAL": timedelta(milliseconds=200)}
        yield server
        forget_engine()


def events(caplog: pytest.LogCaptureFixture, logger: str = "django_delayq.worker") -> list[str]:
    """What this logger told, without what is only for those who look closely."""
    records = [record for record in caplog.records if record.name == logger and record.levelno >= logging.WARNING]
    return [str(vars(record)["event"]) for record in records]


def test_what_redis_lost_is_there_again_after_a_sweep(start_worker: StartWorker, own_redis: RedisProcess) -> None:
    start_worker()
    rows = due_orders("remind", 20, seconds=1.5)
    with own_redis.client() as client:
        client.flushall()
    wait_until(all_are("fired"))
    assert Effect.objects.count() == 20
    assert rows


def test_what_was_never_pushed_is_found(start_worker: StartWorker, own_redis: RedisProcess) -> None:
    rows = due_orders("remind", 20, hours=2)  # beyond the horizon
    engine = get_engine()
    assert engine is not None
    assert engine.queue("default", 0).stats().total == 0
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(run_at=rows[0].created_at + timedelta(seconds=1))
    start_worker()
    wait_until(all_are("fired"))


def test_what_was_committed_long_after_its_deadline_is_found(
    start_worker: StartWorker, own_redis: RedisProcess
) -> None:
    rows = due_orders("remind", 3, hours=2)
    start_worker()
    wait_until(lambda: own_redis.client().exists(f"{prefix_of()}:turn:full-sweep"))
    # As after a transaction that lasted five minutes: overdue by more than the quick sweep looks back.
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(run_at=rows[0].created_at - timedelta(minutes=5))
    with own_redis.client() as client:
        client.delete(f"{prefix_of()}:turn:full-sweep")  # a minute passes
    wait_until(all_are("fired"))


def prefix_of() -> str:
    engine = get_engine()
    assert engine is not None
    return engine.prefix


@pytest.mark.parametrize("way", ["refused", "black hole"])
def test_without_redis_the_ledger_is_read_until_it_is_back(
    start_worker: StartWorker, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    start_worker()
    due_orders("remind", 5)
    wait_until(all_are("fired"))
    if way == "refused":
        own_redis.kill()
    else:
        own_redis.pause()
    due_orders("remind", 5)
    due_orders("remind", 5, seconds=0.5)
    wait_until(all_are("fired"))
    assert "redis_away" in events(caplog)
    if way == "refused":
        own_redis.start()
    else:
        own_redis.resume()
    wait_until(lambda: events(caplog) == ["redis_away", "redis_back"])
    forget_engine()  # or the producers' breaker would leave the next ones to the sweep
    due_orders("remind", 5)
    wait_until(all_are("fired"))
    assert Effect.objects.count() == 20
    assert events(caplog) == ["redis_away", "redis_back"]


def test_a_worker_that_starts_without_redis_goes_over_to_it(
    start_worker: StartWorker, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.kill()
    due_orders("remind", 5)
    start_worker()
    wait_until(all_are("fired"))
    own_redis.start()
    wait_until(lambda: events(caplog) == ["redis_away", "redis_back"])


def test_what_is_running_when_redis_goes_away_is_fired_once(start_worker: StartWorker, own_redis: RedisProcess) -> None:
    due_orders("remind", 200)
    start_worker(concurrency=2)
    wait_until(lambda: Effect.objects.count() > 20)
    own_redis.kill()
    wait_until(all_are("fired"))
    assert Effect.objects.count() == 200


def test_a_redis_without_its_scripts_goes_on(start_worker: StartWorker, own_redis: RedisProcess) -> None:
    start_worker()
    due_orders("remind", 10, seconds=0.5)
    with own_redis.client() as client:
        client.script_flush()
    due_orders("remind", 10)
    wait_until(all_are("fired"))


def test_a_full_redis_drains_and_what_it_has_no_room_for_is_fired_from_the_ledger(
    start_worker: StartWorker, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """If it did not drain it might be our own entries that keep it full, for ever."""
    caplog.set_level(logging.INFO, "django_delayq")
    due_orders("remind", 30, seconds=1)
    engine = get_worker_engine()
    assert engine is not None
    queue = engine.queue("default", 0)
    assert queue.stats().total == 30
    with own_redis.client() as client:
        client.config_set("maxmemory", "1")
        start_worker()
        due_orders("remind", 10, seconds=1)
        due_orders("remind", 10, seconds=2)
        wait_until(all_are("fired"))
        wait_until(lambda: queue.stats().total == 0)
        assert events(caplog) == ["redis_full"]
        client.config_set("maxmemory", "0")
    engine.close()
    assert Effect.objects.count() == 50


@once
@pytest.mark.parametrize("name", ["refused", "silent", "read_only", "cannot_save"])
def test_beside_a_redis_that_is_away_a_worker_fires_and_neither_asks_often_nor_says_much(
    start_worker: StartWorker, settings: Settings, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "django_delayq")
    with FAULTS[name]() as wire:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": wire.url, "SWEEP_INTERVAL": timedelta(seconds=5)}
        due_orders("remind", 5, seconds=2)
        opened, began = wire.opened, time.monotonic()
        running = start_worker()
        wait_until(all_are("fired"))
        running.stop()
        seconds = time.monotonic() - began
        # A few threads find out by themselves; then one listens again at most every half second, and one probes.
        assert wire.opened - opened <= 20 + 4 * seconds
        forget_engine()
    assert events(caplog) == ["redis_away"]
    assert len([line for line in caplog.records if line.name.startswith("django_delayq")]) <= 3


@once
def test_of_a_redis_that_is_away_only_one_answer_is_waited_for_and_for_a_second_at_most(
    start_worker: StartWorker, own_redis: RedisProcess, settings: Settings
) -> None:
    """So that with the look into the ledger, once a second, nothing is later than two seconds."""
    engine = get_worker_engine()
    assert engine is not None
    assert isinstance(engine.client, redis.Redis)
    options = engine.client.connection_pool.connection_kwargs
    assert options["socket_timeout"] + POLL_SECONDS <= 2
    assert options["socket_connect_timeout"] + POLL_SECONDS <= 2
    assert options["retry"].get_retries() == 0
    with Wire(own_redis.port) as wire:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": wire.url, "SWEEP_INTERVAL": timedelta(minutes=1)}
        running = start_worker()
        due_orders("remind", 1)
        wait_until(all_are("fired"))
        wire.go_silent()
        wire.asked = 0
        due_orders("remind", 20, seconds=0.5)
        wait_until(all_are("fired"))
        assert wire.asked <= 3, "the look that found out, the producers', and an acknowledgement at the most"
        running.stop()


@once
def test_a_user_who_may_not_subscribe_does_not_connect_all_the_time(
    start_worker: StartWorker, own_redis: RedisProcess, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis 7 gives a new user no channel: a setup that works, a second late, and must not be a busy one."""
    caplog.set_level(logging.INFO, "django_delayq")
    with own_redis.client() as client, Wire(own_redis.port) as wire:
        client.acl_setuser("shop", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"], channels=[])
        url = wire.url.replace("redis://", "redis://shop:secret@")
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": url, "SWEEP_INTERVAL": timedelta(minutes=1)}
        began = time.monotonic()
        start_worker()
        due_orders("remind", 3, seconds=2)
        due_orders("remind", 3, seconds=1)
        wait_until(all_are("fired"))
        assert wire.opened <= 20 + 2 * (time.monotonic() - began)
        told = [line for line in caplog.records if vars(line).get("event") == "wakeup_interrupted"]
        assert len(told) == 1
        assert events(caplog) == []


@once
def test_a_subscription_that_is_silently_dead_makes_nothing_later_than_the_longest_wait(
    start_worker: StartWorker, own_redis: RedisProcess, settings: Settings
) -> None:
    """No error ever comes, and the sweep is a minute away: only the worker's own look can find the new ones."""
    with Wire(own_redis.port) as wire:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": wire.url, "SWEEP_INTERVAL": timedelta(minutes=1)}
        start_worker()
        due_orders("remind", 1)
        wait_until(all_are("fired"))
        wire.go_silent_to_subscribers()
        for _ in range(3):
            dropped = wire.dropped
            due_orders("remind", 2)
            # Ten seconds of silence would have the subscriber ask for a sign of life: what comes before was not its.
            wait_until(all_are("fired"), seconds=9)
            assert wire.dropped > dropped, "Redis has called, and the call was lost"
    assert LONGEST_WAIT_SECONDS <= 1


class Steady:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def steady() -> Steady:
    return Steady()


@pytest.fixture
def link(steady: Steady, own_redis: RedisProcess) -> Iterator[Link]:
    engine = get_worker_engine()
    assert engine is not None
    yield Link(engine, monotonic=steady)
    engine.close()


def test_outages_that_follow_close_upon_each_other_are_probed_ever_more_rarely(link: Link, steady: Steady) -> None:
    pauses = []
    for _ in range(5):
        link.lost(EngineUnavailable("away"))
        pauses.append(link.pause_seconds)
        link.probe(["default"])
        link.back()
        steady.seconds += 1
    assert pauses == [0.5, 1, 2, 4, 5]
    steady.seconds += 60
    link.lost(EngineUnavailable("away"))
    assert link.pause_seconds == 0.5


def test_a_probe_asks_what_a_worker_needs_of_every_queue(link: Link, own_redis: RedisProcess) -> None:
    link.probe(["default", "mail"])
    with own_redis.client() as client:
        assert client.dbsize() == 0, "it changes nothing"
        client.replicaof("127.0.0.1", "1")
        assert client.ping()
        with pytest.raises(EngineUnavailable, match="read only replica"):
            link.probe(["default"])
        client.replicaof("NO", "ONE")


def test_a_redis_at_its_limit_is_full_until_it_has_refused_nothing_for_a_while(
    link: Link, steady: Steady, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        link.failed(EngineFull("OOM"))
        assert link.is_up and link.is_full
        steady.seconds += 10
        link.took_all()
    assert link.is_full
    steady.seconds += 30
    link.took_all()
    assert not link.is_full
    assert events(caplog) == ["redis_full", "redis_has_room"]


class Failing:
    """Stands before a function and raises the database's error a few times."""

    def __init__(self, function: Callable[..., Any], times: int) -> None:
        self.function = function
        self.left = times

    def __call__(self, *arguments: Any) -> Any:
        if self.left:
            self.left -= 1
            raise OperationalError("the server closed the connection")
        return self.function(*arguments)


@pytest.mark.usefixtures("source")
def test_a_database_that_fails_is_asked_again_and_told_of_once(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(plan, 3)
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
        due_orders("remind", 10)
        wait_until(all_are("fired"))
    assert Effect.objects.count() == 35
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}
    assert states() == {"fired": 35}


def cut_all_other_connections() -> None:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()")
        for (id,) in cursor.fetchall():
            cursor.execute(f"KILL {id}")


def test_an_error_that_nobody_thought_of_does_not_end_the_worker(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, with_redis: Any
) -> None:
    left = [1]

    def surprise(*arguments: Any) -> Any:
        if left.pop() if left else 0:
            raise ZeroDivisionError
        return plan(*arguments)

    monkeypatch.setattr("django_delayq.worker.dispatch.plan", surprise)
    due_orders("remind", 5)
    start_worker()
    wait_until(all_are("fired"))
    assert any(record.exc_info for record in caplog.records)
