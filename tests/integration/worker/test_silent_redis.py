"""Whatever an attacker writes to Redis, once or all the time, workers still find the due timeouts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.core.checks import INFO, WARNING
from pytest_django import Settings

from django_delayq import Limits, Rate, TimeoutPolicy, clock
from django_delayq.engine.engine import DUE_UNIT, DelayQueue
from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import examine
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, worker_engine
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
LEASE = timedelta(seconds=2)
LEASED, IN_A_LEASE_MS = 2**52, 1500
COUNT = 2_000


@pytest.fixture
def queue(with_redis: redis.Redis, settings: Settings) -> Iterator[DelayQueue]:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": LEASE, "SWEEP_INTERVAL": timedelta(milliseconds=500)}
    with worker_engine() as engine:
        yield engine.queue("default", 0)


class Attack:
    """Each method writes something harmful, beside the entries of the rows that exist now."""

    def __init__(self, client: Any, queue: DelayQueue) -> None:
        self.client, self.queue, self.rows = client, queue, list(Timeout.objects.all())
        self.lines_of_rows = {row.policy: queue.keys.line(row.policy) for row in self.rows}

    def heads(self) -> None:
        self.client.zadd(self.queue.keys.heads, {f"x{number}": 1 for number in range(COUNT)})

    def lines(self) -> None:
        self.heads()
        pipeline = self.client.pipeline(transaction=False)
        for number in range(COUNT):
            pipeline.zadd(self.queue.keys.line(f"x{number}"), {"1": 1})
        pipeline.execute()

    def junk_heads(self) -> None:
        self.client.zadd(self.queue.keys.heads, {b"\xff %d" % number: "-inf" for number in range(COUNT)})

    def wrong_heads(self) -> None:
        """The heads of our lines say that nothing is due."""
        self.client.zadd(self.queue.keys.heads, dict.fromkeys(self.lines_of_rows, "inf"))

    def leases(self) -> None:
        score = LEASED + (int(self.client.time()[0]) * 1000 + IN_A_LEASE_MS) * DUE_UNIT
        for row in self.rows:
            self.client.zadd(self.lines_of_rows[row.policy], {str(row.pk): score})

    def strangers(self) -> None:
        """Ids without a row, before those of our rows."""
        for line in self.lines_of_rows.values():
            self.client.zadd(line, {str(10**15 + number): 0 for number in range(COUNT)})

    def nothing_left(self) -> None:
        self.client.delete(self.queue.keys.heads, *self.lines_of_rows.values())


@contextmanager
def again_and_again(write: Callable[[], object]) -> Iterator[None]:
    """Write now, and in a thread until the block ends."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(0.01):
            write()

    write()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stopping.set()
    thread.join()


@pytest.mark.parametrize("attack", ["lines", "junk_heads", "wrong_heads", "leases", "strangers", "nothing_left"])
def test_due_timeouts_fire(
    queue: DelayQueue,
    with_redis: redis.Redis,
    start_worker: StartWorker,
    declare: Callable[..., TimeoutPolicy[Any]],
    attack: str,
) -> None:
    due_orders("remind", 5)
    due_orders(declare(Order, name="paced", limits=Limits(rate=Rate(1000, per=timedelta(seconds=1)))), 5)
    with again_and_again(getattr(Attack(with_redis, queue), attack)):
        start_worker()
        wait_until(all_are("fired"), "all have fired")


@pytest.mark.parametrize("attack", ["heads", "leases"])
def test_the_doctor_does_not_call_it_in_step(queue: DelayQueue, with_redis: redis.Redis, attack: str) -> None:
    due_orders("remind", 5)
    Timeout.objects.update(run_at=clock.now() - 2 * LEASE)
    [before] = [finding.level for finding in examine(quick=True) if finding.id == "redis.in_step"]
    getattr(Attack(with_redis, queue), attack)()
    [after] = [finding.level for finding in examine(quick=True) if finding.id == "redis.in_step"]
    assert (before, after) == (INFO, WARNING)
