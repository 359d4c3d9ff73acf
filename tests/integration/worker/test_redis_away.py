"""A worker during each kind of outage of Redis: what it fires, its calls, and its log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis
from django.core.checks import INFO, WARNING, run_checks
from pytest_django import Settings

from django_delayq import clock
from django_delayq.engine.engine import DUE_UNIT
from django_delayq.exceptions import EngineFull
from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.redis_clients import forget_engine
from django_delayq.worker.servers import RedisHealth
from tests.e2e.outages.conftest import once
from tests.e2e.outages.faults import FAULTS
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import Steady, wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events, queue_in_redis, worker_engine
from tests.testapp.models import Effect

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


def test_a_full_redis_drains_and_what_it_has_no_room_for_is_fired_from_the_ledger(
    start_worker: StartWorker, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries of the library might keep Redis full indefinitely if they were not drained."""
    caplog.set_level(logging.INFO, "django_delayq")
    due_orders("remind", 30, seconds=1)
    with own_redis.client() as client, worker_engine() as engine:
        queue = engine.queue("default", 0)
        assert queue.stats().total == 30
        client.config_set("maxmemory", "1")
        start_worker()
        due_orders("remind", 10, seconds=1)
        due_orders("remind", 10, seconds=2)
        wait_until(all_are("fired"))
        wait_until(lambda: queue.stats().total == 0)
        assert events(caplog) == ["redis_full"]
        client.config_set("maxmemory", "0")
    assert Effect.objects.count() == 50


@once
@pytest.mark.dialect
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
    lines = [line for line in caplog.records if line.name.startswith("django_delayq") and line.levelno > logging.INFO]
    assert len([line for line in lines if vars(line).get("event") != "too_few_connections"]) <= 2  # of a small pool


@pytest.fixture
def health(steady: Steady, own_redis: RedisProcess) -> Iterator[RedisHealth]:
    with worker_engine() as engine:
        yield RedisHealth(engine, monotonic=steady)


def test_a_redis_at_its_limit_is_full_until_it_has_refused_nothing_for_a_while(
    health: RedisHealth, steady: Steady, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        health.failed(EngineFull("OOM"))
        assert health.is_up and health.is_full
        steady.seconds += 10
        health.accepted()
    assert health.is_full
    steady.seconds += 300
    assert health.is_full, "until the next sweep, however rarely the worker sweeps"
    health.accepted()
    assert not health.is_full
    assert events(caplog) == ["redis_full", "redis_has_room"]


@pytest.mark.parametrize(
    ("policy", "is_told"), [("allkeys-lru", True), ("allkeys-random", True), ("volatile-lru", False)]
)
def test_a_check_names_a_redis_that_throws_out_due_times(own_redis: RedisProcess, policy: str, is_told: bool) -> None:
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", policy)
    found = [message.msg for message in run_checks(tags=["django_delayq"], include_deployment_checks=True)]
    assert any(policy in message for message in found) == is_told
    assert not any(policy in message.msg for message in run_checks(tags=["django_delayq"]))


@pytest.mark.parametrize("what", ["heads", "leases"])
def test_the_doctor_does_not_call_a_redis_in_step_that_somebody_has_filled(
    with_redis: redis.Redis, settings: Settings, what: str
) -> None:
    lease = timedelta(minutes=10)  # no test reads the doctor's answer later than that
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": lease, "SWEEP_INTERVAL": timedelta(milliseconds=500)}
    rows, keys = due_orders("remind", 5), queue_in_redis().keys
    Timeout.objects.update(run_at=clock.now() - 2 * lease)
    [before] = [finding.level for finding in examine(quick=True) if finding.id == "redis.in_step"]
    if what == "heads":
        with_redis.zadd(keys.heads, {f"x{number}": 1 for number in range(2_000)})
    else:
        score = 2**52 + int((time.time() + lease.total_seconds() * 3 / 4) * 1000) * DUE_UNIT  # that of a lease
        with_redis.zadd(keys.line("testapp.order.remind"), {str(row.pk): score for row in rows})
    [after] = [finding.level for finding in examine(quick=True) if finding.id == "redis.in_step"]
    assert (before, after) == (INFO, WARNING)
