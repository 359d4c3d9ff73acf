"""An attacker who can write anything to Redis, and real workers."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections

from django_delayq import cancel_timeout, schedule_timeout
from django_delayq.engine.records import QueueKeys, turn_key
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.redis_clients import key_prefix
from tests.settings import DB
from tests.support.processes import StartLogged, effects, memory_mb
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

if TYPE_CHECKING:
    import redis

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DB != "postgresql", reason="what Redis holds is the same with each database"),
]

LEASED = 2**52
FORGED_IDS = ["0", "-1", "+7", "007", "1.0", "1e3", " 1", "1\n", "nan", "inf", "१२", "x", "", "9" * 40]
FORGED_IDS += [str(2**63), str(2**63 - 1), str(2**64), "1; DROP TABLE x", "__import__('os').abort()"]
SCORES = ["-inf", "+inf", "-1", "-1e300", "1e300", "0", "0.5", "15", str(2**53), str(2**53 + 2), "1e17"]
LINE = "testapp.order.remind"
MESSAGES = [b"", b"nan", b"-1", b"9" * 100_000, b"\xff\xfe", b"\x80\x04cos\nsystem\n(S'false'\ntR.", b"*1\r\n$4\r\n"]


@pytest.fixture
def keys(redis_client: redis.Redis) -> QueueKeys:
    return QueueKeys.of(key_prefix("default"), "default", 0, 1)


class Hostile(threading.Thread):
    """Writes harmful data repeatedly until it is stopped."""

    def __init__(self, client: redis.Redis, keys: QueueKeys, ids: list[int]) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.keys = keys
        self.entries = keys.line(LINE)
        self.ids = ids
        self.random = random.Random(1)
        self.rounds = 0
        self.error: BaseException | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.wait(0.01):
                self.write()
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)
        assert self.error is None

    def write(self) -> None:
        pipe = self.client.pipeline(transaction=False)
        if self.random.random() < 0.2:
            names = [self.entries, self.keys.heads, self.keys.counter]
            pipe.delete(*names)
            for key in names:
                pipe.execute_command(self.random.choice(["SET", "RPUSH", "SADD"]), key, "x")
            pipe.execute(raise_on_error=False)
        early = [0, 15, 1024 + 3, LEASED, LEASED + 15, LEASED + 1024 + 8]  # waiting and lapsed, with made-up deliveries
        scores = {str(id): self.random.choice(early) for id in self.ids}
        pipe.zadd(self.entries, scores)
        score = self.random.choice(SCORES)
        pipe.zadd(self.entries, {f"{word}{self.random.choice(['', '0'])}": score for word in FORGED_IDS})
        pipe.zadd(self.keys.heads, {**dict.fromkeys(FORGED_IDS, score), LINE: self.random.choice(SCORES)})
        pipe.zadd(self.keys.heads, {b"\xff": score})
        pipe.publish(self.keys.wake, self.random.choice(MESSAGES))
        pipe.set(self.keys.counter, self.random.choice(["64", "-1", "x" * 1000, "9" * 30]))
        pipe.execute(raise_on_error=False)


def rows_before(row: Timeout | None) -> list[Any]:
    """Return the states of the timeouts that were scheduled before `row`."""
    rows = Timeout.objects.order_by("pk") if row is None else Timeout.objects.filter(pk__lt=row.pk).order_by("pk")
    return list(rows.values_list("pk", "state", "cause", "run_at", "attempts", "history", "claims", "settled_at"))


def order() -> Order:
    return Order.objects.create(status="new")


def test_whatever_is_written_nothing_fires_early_or_twice_or_dies_unrun(
    start_logged: StartLogged, redis_client: redis.Redis, keys: QueueKeys
) -> None:
    later = [schedule_timeout(order(), "remind", hours=1) for _ in range(5)]
    cancelled = [schedule_timeout(order(), "remind", hours=1) for _ in range(5)]
    for row in cancelled:
        assert cancel_timeout(row)
    before = rows_before(None)
    workers = [start_logged("-v0"), start_logged("-v0")]
    first = schedule_timeout(order(), "remind", seconds=0)
    wait_until(lambda: WorkerSeen.objects.count() == 2, "the workers are there, and notice SIGTERM")
    hostile = Hostile(redis_client, keys, [row.pk for row in [*later, *cancelled, first]])
    hostile.start()
    due = [first]
    for _ in range(30):
        due.append(schedule_timeout(order(), "remind", seconds=0))
        hostile.ids.append(due[-1].pk)
    wait_until(lambda: len(effects("remind")) == len(due), "the due timeouts have fired", 120)
    wait_until(lambda: hostile.rounds > 50, "all attacks were tried")
    hostile.stop()
    words = "".join(worker.stop() for worker in workers)
    assert effects("remind") == {row.pk: 1 for row in due}
    assert Effect.objects.count() == len(due)
    assert rows_before(first) == before, "those did not change"
    assert set(Timeout.objects.filter(pk__gte=first.pk).values_list("state", "cause")) == {("fired", "due")}
    assert words.count("invalid members") <= len(workers), "logged once by each"
    assert "Traceback" not in words
    assert len(words) < 20_000


def test_a_queue_full_of_garbage_keeps_nobody_from_firing(
    start_logged: StartLogged, redis_client: redis.Redis, keys: QueueKeys
) -> None:
    """Add 300,000 invalid members, 20,000 ids without a row, and some members of a few megabytes."""
    worker = start_logged("-v0")
    schedule_timeout(order(), "remind", seconds=0)
    wait_until(lambda: effects("remind"), "the worker is there")
    before = memory_mb(worker.process.pid)
    entries = keys.line(LINE)
    for start in range(0, 300_000, 10_000):
        redis_client.zadd(entries, {f"x{number}": 1 for number in range(start, start + 10_000)})
    redis_client.zadd(entries, {str(10**15 + number): 2 for number in range(20_000)})
    redis_client.zadd(entries, {letter * 4_000_000: 1 for letter in "abc"})
    due = [schedule_timeout(order(), "remind", seconds=0) for _ in range(10)]
    wait_until(lambda: len(effects("remind")) == 1 + len(due), "the due timeouts have fired")
    wait_until(lambda: redis_client.zcard(entries) == 0, "the garbage is gone", 120)
    assert memory_mb(worker.process.pid) < before + 24
    assert worker.stop().count("invalid members") == 1
    assert set(effects("remind").values()) == {1}
    connections.close_all()


def test_every_key_may_be_of_another_type(
    start_logged: StartLogged, redis_client: redis.Redis, keys: QueueKeys
) -> None:
    def fill(name: str, number: int) -> None:
        redis_client.delete(name)
        other = (["SET", name, "x"], ["RPUSH", name, "x"], ["SADD", name, "x"], ["HSET", name, "x", "x"])
        redis_client.execute_command(*(*other, ["XADD", name, "*", "x", "x"])[number])

    turns = (turn_key(key_prefix("default"), work) for work in ("sweep", "full-sweep"))
    names = [keys.line(LINE), keys.heads, keys.counter, keys.wake, *turns]
    for name in names:
        fill(name, 0)
    worker = start_logged("-v0")
    for number in range(5):
        for name in names:
            fill(name, number)
        schedule_timeout(order(), "remind", seconds=0)
        wait_until(lambda count=number: len(effects("remind")) == count + 1, "it fires")  # type: ignore[misc]
    worker.stop()
