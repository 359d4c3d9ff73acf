"""Two ledgers share one Redis: each has its own keys, its own workers and its own turns, although their ids overlap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management.color import no_style
from django.db import connections
from pytest_django import Settings

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine, get_engine, get_worker_engine
from django_delayq.worker.sweep import try_claim_turn
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker
from tests.testapp.models import Order

if TYPE_CHECKING:
    import redis

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True, databases=["default", "replica"])]

Declare = Callable[..., dq.TimeoutPolicy[Any]]
LEDGERS = ("default", "replica")
HOUR = timedelta(hours=1)
next_million = itertools.count(1_000_000, 1_000_000)


@pytest.fixture(autouse=True)
def one_redis(settings: Settings, redis_client: redis.Redis) -> Iterator[None]:
    """Without routers both databases have a ledger. After its start no worker sweeps, which would hide lost entries."""
    settings.DATABASE_ROUTERS = []
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": HOUR, "SYNC_INTERVAL": HOUR}
    yield
    forget_engine()


def schedule(policy: Any, ledger: str, **delay: Any) -> Timeout:
    order = Order.objects.using(ledger).create(status="new")
    return dq.schedule_timeout(order, policy, **delay or {"after": timedelta(0)})


def make_ids_overlap(policy: Any) -> None:
    """Make the next timeout of each ledger get the same id."""
    last = next(next_million)
    for ledger in LEDGERS:
        row = schedule(policy, ledger, hours=9)
        row.delete()
        row.pk = last
        Timeout.objects.using(ledger).bulk_create([row])
        with connections[ledger].cursor() as cursor:
            for statement in connections[ledger].ops.sequence_reset_sql(no_style(), [Timeout]):
                cursor.execute(statement)
        row.delete()


def state(row: Timeout) -> str:
    return Timeout.objects.using(row._state.db).get(pk=row.pk).state


def entries(ledger: str) -> int:
    engine = get_engine(ledger)
    assert engine is not None
    return engine.queue("default", 0).stats().total


def test_a_worker_leaves_the_entries_of_another_ledger_alone(declare: Declare) -> None:
    policy = declare(Order, name="shard")
    make_ids_overlap(policy)
    worker = RunningWorker(using="default", concurrency=1)
    first = schedule(policy, "default")
    wait_until(lambda: state(first) == "fired", "the worker has started")
    other, own = (schedule(policy, ledger) for ledger in reversed(LEDGERS))
    wait_until(lambda: state(own) == "fired" and not entries("default"), "its own one has fired")
    worker.stop()
    assert (state(other), entries("replica")) == ("pending", 1)
    make_ids_overlap(policy)
    near = schedule(policy, "default", minutes=1)
    dq.cancel_timeout(schedule(policy, "replica", minutes=1))
    assert (state(near), entries("default")) == ("pending", 1)


def test_a_turn_of_one_ledgers_worker_leaves_that_of_the_other_free() -> None:
    engines = [get_worker_engine(ledger) for ledger in (*LEDGERS, *LEDGERS)]
    assert [try_claim_turn(engine, "sweep", HOUR) for engine in engines] == [True, True, False, False]
    for engine in engines:
        assert engine is not None
        engine.close()
