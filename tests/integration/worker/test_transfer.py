"""From the queues in Redis, each its fair share; and back to them what did not end well."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from django_delayq import clock
from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineError
from django_delayq.redis_clients import get_worker_engine
from django_delayq.remote import RemoteExecutor
from django_delayq.worker.dispatch import MAX_PREFETCH, Prefetch
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sources.redis import AHEAD_MS, LEAD_MS, MAX_WAIT_SECONDS, RedisSource
from tests.engine.redis_process import RedisProcess

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings


@pytest.fixture
def engine(with_redis: redis.Redis) -> Iterator[Engine]:
    made = get_worker_engine("default")
    assert made is not None
    yield made
    made.close()


LINE = "testapp.order.remind"


def transfer(engine: Engine, *queues: str) -> RedisSource:
    return RedisSource(engine, queues, ClockSkew("default"))


def fill(engine: Engine, queue: str, ids: range, due_ms: int = 0) -> None:
    for id in ids:
        engine.queue(queue, engine.shard_of(id)).ensure(LINE, [(id, due_ms)])


def now_ms(engine: Engine) -> int:
    return engine.queue("default", 0).stats().now_ms


def test_a_flood_in_one_queue_leaves_the_others_their_share(engine: Engine) -> None:
    fill(engine, "flood", range(1, 500))
    fill(engine, "calm", range(1000, 1005))
    fill(engine, "quiet", range(2000, 2005))
    taken = transfer(engine, "flood", "calm", "quiet").take(30)
    assert len(taken.deliveries) == 30
    assert {id for id in taken.deliveries if id >= 1000} == {*range(1000, 1005), *range(2000, 2005)}
    assert taken.wait_seconds == 0


def test_queues_take_turns_when_there_is_room_for_one_only(engine: Engine) -> None:
    fill(engine, "a", range(1, 50))
    fill(engine, "b", range(100, 150))
    fill(engine, "c", range(200, 250))
    one = transfer(engine, "a", "b", "c")
    taken = [next(iter(one.take(1).deliveries)) // 100 for _ in range(9)]
    assert sorted(taken) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_one_busy_queue_gets_all_the_room(engine: Engine) -> None:
    fill(engine, "a", range(1, 50))
    assert len(transfer(engine, "a", "b", "c").take(40).deliveries) == 40


def test_every_shard_is_looked_at(settings: Settings, with_redis: redis.Redis) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SHARDS": 4}
    engine = get_worker_engine("default")
    assert engine is not None
    fill(engine, "a", range(1, 60))
    assert set(transfer(engine, "a").take(100).deliveries) == set(range(1, 60))
    engine.close()


def test_it_waits_until_shortly_before_the_next_deadline_and_a_second_at_most(engine: Engine) -> None:
    one = transfer(engine, "a", "b")
    assert MAX_WAIT_SECONDS * 0.5 < one.take(10).wait_seconds <= MAX_WAIT_SECONDS
    fill(engine, "b", range(1, 2), now_ms(engine) + 900)
    assert one.take(10).deliveries == {}, "it checks again only after `check_now`"
    one.check_now()
    assert 0 < one.take(10).wait_seconds <= (900 - LEAD_MS) / 1000


def test_what_is_about_to_be_due_is_taken(engine: Engine) -> None:
    one = transfer(engine, "a")
    fill(engine, "a", range(1, 2), now_ms(engine) + 60_000)
    assert one.take(10).deliveries == {}
    engine.queue("a", 0).reschedule(LINE, [(1, now_ms(engine) + AHEAD_MS)])
    one.check_now()
    assert one.take(10).deliveries == {1: 1}


def test_what_is_settled_is_acknowledged_or_released(engine: Engine) -> None:
    fill(engine, "a", range(1, 6))
    one = transfer(engine, "a")
    one.take(10)
    later = clock.now() + timedelta(minutes=5)
    one.resolve([1, 2], {3: later})
    one.flush()
    queue = engine.queue("a", 0)
    assert {id for id, _ in queue.peek()} == {3, 4, 5}
    assert queue.stats().leased == 2
    one.resolve([4], {})
    one.resolve([5], {})
    one.flush()
    assert {id for id, _ in queue.peek()} == {3}


def test_an_id_that_was_lost_and_taken_again_is_settled_under_its_new_lease(engine: Engine, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(milliseconds=50)}
    fill(engine, "a", range(1, 3))
    one = transfer(engine, "a")
    assert one.take(10).deliveries == {1: 1, 2: 1}
    deliveries: dict[int, int] = {}
    while len(deliveries) < 2:  # the leases lapse by the server's clock
        one.check_now()
        deliveries.update(one.take(10).deliveries)
    assert deliveries == {1: 2, 2: 2}
    one.resolve([1, 2], {})
    one.flush()
    assert engine.queue("a", 0).stats().total == 0


def test_what_one_queue_has_leased_is_released_when_the_next_queue_fails(
    own_redis: RedisProcess, settings: Settings
) -> None:
    """Otherwise the worker would extend leases that it does not know of, and no worker would fire their timeouts."""
    with own_redis.client() as client:
        client.acl_setuser("shop", enabled=True, passwords=["+secret"], keys=["*{a.0}*"], commands=["+@all"])
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://shop:secret@127.0.0.1:{own_redis.port}/0"}
    engine = get_worker_engine("default")
    assert engine is not None
    fill(engine, "a", range(1, 4))
    one = transfer(engine, "b", "a")
    with pytest.raises(EngineError):
        one.take(10)
    assert engine.queue("a", 0).stats().leased == 3
    one.flush()
    assert transfer(engine, "a").take(10).deliveries == {1: 1, 2: 1, 3: 1}
    engine.close()


def test_a_lease_that_was_lost_is_told_of_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    fill(engine, "a", range(1, 4))
    one = transfer(engine, "a")
    one.take(10)
    engine.queue("a", 0).reschedule(LINE, [(1, 0)])
    for _ in range(3):
        one.extend()
    assert [record.event for record in caplog.records] == ["lease_lost"]  # type: ignore[attr-defined]


def test_a_worker_holds_what_it_can_do_soon() -> None:
    prefetch = Prefetch(4)
    assert prefetch.room(0) == 100
    for _ in range(20):
        prefetch.completed(in_flight=100, seconds=0.01)
    assert prefetch.size > 900
    for _ in range(20):
        prefetch.completed(in_flight=4, seconds=10)
    assert prefetch.size == 4
    assert prefetch.room(4) == 0
    assert prefetch.room(2) == 2


def test_a_task_queue_that_needs_a_second_for_each_message_gets_no_less_than_it_does_in_two() -> None:
    prefetch = Prefetch(4, RemoteExecutor.prefetch_seconds)
    for _ in range(20):
        prefetch.completed(in_flight=prefetch.size, seconds=1)
    assert prefetch.size > 0.9 * MAX_PREFETCH
    for _ in range(20):
        prefetch.completed(in_flight=100, seconds=10)
    assert prefetch.size < 25


def test_little_room_in_a_large_appetite_is_not_worth_asking() -> None:
    prefetch = Prefetch(4)
    assert prefetch.room(90) == 0
    assert prefetch.room(70) == 30
