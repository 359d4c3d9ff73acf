"""From the lines in Redis, as many of each as are asked for; and back to them what did not end well."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import pytest
from pytest_django import Settings

from django_delayq import clock
from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineError
from django_delayq.worker.lines import Lines
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sources.ledger import POLL_SECONDS
from django_delayq.worker.sources.redis import RedisSource
from tests.engine.redis_process import RedisProcess
from tests.support.workers import worker_engine

pytestmark = pytest.mark.django_db(transaction=True)


REMIND, LINGER, UNPAID = (f"testapp.order.{name}" for name in ("remind", "linger", "cancel_unpaid"))


class Transfer(RedisSource):
    """A source that is asked for so many of each line that may have due entries."""

    def __init__(self, engine: Engine, *queues: str) -> None:
        super().__init__(engine, queues, ClockSkew("default"))
        self.lines = Lines("default", 4, 0.5)

    def taken(self, room: int = 10) -> dict[int, int]:
        """Return the deliveries, at most `room` of each line."""
        found = self.take(dict.fromkeys(self.due(self.lines), room))
        return {id: count for of_line in found.values() for id, count in of_line.items()}

    @property
    def wait(self) -> float:
        return self.seconds_left(self.lines.declared(), ())


def fill(engine: Engine, queue: str, ids: Iterable[int], due_ms: int = 0, line: str = REMIND) -> None:
    for id in ids:
        engine.queue(queue, engine.shard_of(id)).ensure(line, [(id, due_ms)])


def test_each_line_gives_what_it_is_asked_for(engine: Engine) -> None:
    fill(engine, "a", range(1, 500))
    fill(engine, "a", range(1000, 1005), line=LINGER)
    fill(engine, "b", range(2000, 2005), line=UNPAID)
    fill(engine, "a", range(3000, 3005), line="testapp.order.of_another_release")
    one = Transfer(engine, "a", "b")
    assert sorted(one.due(one.lines)) == sorted([REMIND, LINGER, UNPAID])
    found = one.take({REMIND: 30, LINGER: 10, UNPAID: 2})
    assert {line: len(ids) for line, ids in found.items()} == {REMIND: 30, LINGER: 5, UNPAID: 2}
    assert sorted(one.due(one.lines)) == sorted([REMIND, UNPAID])
    assert one.wait == 0
    assert 0 < one.seconds_left(one.lines.declared(), {REMIND, UNPAID}) <= POLL_SECONDS
    assert engine.queue("a", 0).stats_of("testapp.order.of_another_release").leased == 0, "which is not asked"


def test_what_is_settled_is_acknowledged_or_released(engine: Engine) -> None:
    fill(engine, "a", range(1, 4))
    fill(engine, "a", range(4, 6), line=LINGER)
    one, queue = Transfer(engine, "a"), engine.queue("a", 0)
    one.taken()
    one.resolve([1, 2], {3: clock.now() + timedelta(minutes=5)})
    one.flush()
    assert {id for id, _ in queue.peek()} == {3, 4, 5}
    assert queue.stats().leased == 2
    one.resolve([4], {})
    one.resolve([5], {})
    one.flush()
    assert {id for id, _ in queue.peek()} == {3}


def test_what_one_queue_has_leased_is_released_when_the_next_queue_fails(
    own_redis: RedisProcess, settings: Settings
) -> None:
    """Otherwise the worker would extend leases that it does not know of, and no worker would fire their timeouts."""
    with own_redis.client() as client:
        client.acl_setuser("shop", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"])
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://shop:secret@127.0.0.1:{own_redis.port}/0"}
        with worker_engine() as engine:
            fill(engine, "a", range(1, 4))
            fill(engine, "b", [4])
            one = Transfer(engine, "b", "a")
            assert list(one.due(one.lines)) == [REMIND]
            client.acl_setuser("shop", reset_keys=True, keys=["*{a.0}*"])
            with pytest.raises(EngineError):
                one.take({REMIND: 10})
            assert engine.queue("a", 0).stats().leased == 3
            one.flush()
            assert Transfer(engine, "a").taken() == {1: 1, 2: 1, 3: 1}
