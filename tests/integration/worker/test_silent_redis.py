"""Whatever an attacker writes to Redis, once or all the time, workers still find the due timeouts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.core.checks import INFO, WARNING
from pytest_django import Settings

from django_delayq import Limits, Rate, TimeoutPolicy, clock
from django_delayq.backoff import LogInterval
from django_delayq.engine.engine import DUE_UNIT, DelayQueue
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sweep import Sweep
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events, worker_engine
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
LEASE = timedelta(seconds=2)
LEASED, IN_A_LEASE_MS = 2**52, 1500
Attack = Callable[["redis.Redis", DelayQueue, Sequence[Timeout]], Any]
COUNT = 2_000


@pytest.fixture
def queue(with_redis: redis.Redis, settings: Settings) -> Iterator[DelayQueue]:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": LEASE, "SWEEP_INTERVAL": timedelta(milliseconds=500)}
    with worker_engine() as engine:
        yield engine.queue("default", 0)


def heads(client: redis.Redis, queue: DelayQueue, rows: Sequence[Timeout]) -> None:
    client.zadd(queue.keys.heads, {f"x{number}": 1 for number in range(COUNT)})


def lines(client: redis.Redis, queue: DelayQueue, rows: Sequence[Timeout]) -> None:
    heads(client, queue, rows)
    pipeline = client.pipeline(transaction=False)
    for number in range(COUNT):
        pipeline.zadd(queue.keys.line(f"x{number}"), {"1": 1})
    pipeline.execute()


def junk_heads(client: redis.Redis, queue: DelayQueue, rows: Sequence[Timeout]) -> None:
    client.zadd(queue.keys.heads, {b"\xff %d" % number: "-inf" for number in range(COUNT)})


def wrong_heads(client: redis.Redis, queue: DelayQueue, rows: Sequence[Timeout]) -> None:
    """The heads of our lines say that nothing is due."""
    client.zadd(queue.keys.heads, dict.fromkeys({row.policy for row in rows}, "inf"))


def leases(client: redis.Redis, queue: DelayQueue, rows: Sequence[Timeout]) -> None:
    seconds, _ = client.time()
    score = LEASED + (int(seconds) * 1000 + IN_A_LEASE_MS) * DUE_UNIT
    for row in rows:
        client.zadd(queue.keys.line(row.policy), {str(row.pk): score})


def strangers(client: redis.Redis, queue: DelayQueue, rows: Sequence[Timeout]) -> None:
    """Ids without a row, before those of our rows."""
    for label in {row.policy for row in rows}:
        client.zadd(queue.keys.line(label), {str(10**15 + number): 0 for number in range(COUNT)})


def nothing_left(client: redis.Redis, queue: DelayQueue, rows: Sequence[Timeout]) -> None:
    client.delete(queue.keys.heads, *(queue.keys.line(row.policy) for row in rows))


class Attacker(threading.Thread):
    """Writes it again and again."""

    def __init__(self, write: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._write, self._stopping = write, threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(0.01):
            self._write()

    def stop(self) -> None:
        self._stopping.set()
        self.join()


ATTACKS = [heads, lines, junk_heads, wrong_heads, leases, strangers, nothing_left]


@pytest.mark.parametrize("repeatedly", [False, True], ids=["once", "repeatedly"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_due_timeouts_fire(
    queue: DelayQueue,
    with_redis: redis.Redis,
    start_worker: StartWorker,
    declare: Callable[..., TimeoutPolicy[Any]],
    *,
    attack: Attack,
    repeatedly: bool,
) -> None:
    paced = declare(Order, name="paced", limits=Limits(rate=Rate(1000, per=timedelta(seconds=1))))
    due_orders("remind", 5)
    due_orders(paced, 5)
    rows = list(Timeout.objects.all())
    attack(with_redis, queue, rows)
    attacker = Attacker(lambda: attack(with_redis, queue, rows))  # without a connection, of which a pool has few
    if repeatedly:
        attacker.start()
    start_worker()
    wait_until(all_are("fired"), f"all {len(rows)} have fired")
    if repeatedly:
        attacker.stop()


def test_a_line_of_the_log_names_a_policy_that_is_silent_in_redis(
    queue: DelayQueue,
    with_redis: redis.Redis,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(firing_state, "_log_interval", LogInterval(60))
    rows = due_orders("remind", 5)
    leases(with_redis, queue, rows)
    attacker = Attacker(lambda: leases(with_redis, queue, rows))
    attacker.start()
    start_worker()
    wait_until(all_are("fired"), "they have fired")
    attacker.stop()
    wait_until(lambda: "redis_silent" in events(caplog), "it is logged")
    told = [record for record in caplog.records if vars(record).get("event") == "redis_silent"]
    assert [vars(record)["policy"] for record in told] == ["testapp.order.remind"]
    assert vars(told[0])["timeout_id"] in {row.pk for row in rows}


def test_a_backlog_is_not_taken_for_silence(
    queue: DelayQueue, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    due_orders("remind", 300)
    start_worker(concurrency=1)
    wait_until(all_are("fired"), "they have fired")
    assert events(caplog) == []


def test_the_full_sweep_removes_what_no_policy_and_no_row_owns(
    queue: DelayQueue, with_redis: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    [row, other] = due_orders("remind", 2)
    of_another_release = queue.keys.line("of.another.release")
    Timeout.objects.filter(pk=other.pk).update(policy="of.another.release")
    lines(with_redis, queue, [])
    junk_heads(with_redis, queue, [])
    with worker_engine() as engine:
        Sweep(engine, "default", ClockSkew("default")).run_once(everything=True)
    left = {queue.keys.line(row.policy), of_another_release}
    client: Any = with_redis
    assert {key.decode() for key in client.zrange(queue.keys.heads, 0, -1)} == {row.policy, "of.another.release"}
    assert {key.decode() for key in client.keys(queue.keys.line("") + "*")} == left
    assert events(caplog, "django_delayq.engine") == ["foreign_lines"]


@pytest.mark.parametrize("attack", [heads, lines, leases])
def test_the_doctor_does_not_call_it_in_step(queue: DelayQueue, with_redis: redis.Redis, attack: Attack) -> None:
    due_orders("remind", 5)
    Timeout.objects.update(run_at=clock.now() - 2 * LEASE)
    [before] = [finding.level for finding in examine(quick=True) if finding.id == "redis.in_step"]
    attack(with_redis, queue, list(Timeout.objects.all()))
    [after] = [finding.level for finding in examine(quick=True) if finding.id == "redis.in_step"]
    assert (before, after) == (INFO, WARNING)
