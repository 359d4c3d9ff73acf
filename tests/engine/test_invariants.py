"""What always holds and no sequence of few commands shows: many arguments, every number, and no other key."""

from __future__ import annotations

import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from django_delayq.engine.engine import Engine
from tests.engine.lines import LINE, Entry, lease_of, one_line
from tests.engine.redis_process import RedisProcess
from tests.engine.virtual import VirtualQueue
from tests.support.examples import examples

pytestmark = pytest.mark.slow

TOP_MS = 2**42 - 1


def test_more_than_a_thousand_arguments_are_several_commands_in_one_round_trip(client: redis.Redis) -> None:
    queue = one_line(Engine(client))
    entries, lease = [(id, 0) for id in range(1, 2501)], lease_of(2**52, ids=range(1, 2501))
    for act in (lambda: queue.ensure(entries), lambda: queue.release(lease, entries)):
        act()
        client.config_resetstat()
        act()
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 3


@examples(50)
@given(id=st.integers(1, 2**63 - 1), ms=st.integers(0, TOP_MS - 86_400_000), deliveries=st.integers(1, 17))
@example(id=2**63 - 1, ms=TOP_MS - 86_400_000, deliveries=17)
@example(id=1, ms=0, deliveries=1)
def test_every_time_and_count_comes_back_exactly(
    shared_server: RedisProcess, id: int, ms: int, deliveries: int
) -> None:
    with shared_server.client() as client:
        client.flushall()
        virtual = VirtualQueue(client)
        virtual.queue.ensure([(id, ms)])
        assert virtual.queue.peek() == [(id, ms)]
        virtual.set_clock(ms)
        reserved = virtual.queue.reserve(1, 999)
        for delivery in range(1, deliveries + 1):
            assert reserved.entries == (Entry(id, min(delivery, 15)),)
            assert virtual.queue.peek() == [(id, virtual.now + 999)]
            virtual.advance(999)
            reserved = virtual.queue.reserve(1, 999)
        assert reserved.lease is not None
        assert virtual.queue.release(reserved.lease, [(id, ms)]) == 1
        assert virtual.queue.peek() == [(id, ms)]


def test_no_command_reaches_a_key_that_it_was_not_given(client: redis.Redis) -> None:
    keys = Engine(client).queue("default", 0).keys
    given_keys = [*keys, keys.line(LINE), keys.line("other"), keys.line("")]
    client.acl_setuser("bound", enabled=True, passwords=["+x"], categories=["+@all"], keys=given_keys)
    with client.client() as bound:
        bound.execute_command("AUTH", "bound", "x")
        queue = one_line(Engine(bound))
        queue.ensure([(1, 0), (2, 0)])
        queue.reschedule([(3, 0)])
        lease = queue.reserve(9, 60_000).lease
        assert lease is not None
        lease, _ = queue.extend(lease, 60_000)
        assert queue.acknowledge(lease, [1]) + queue.release(lease, [(2, 5)]) + queue.acknowledge(lease) == 3
        assert queue.stats().total == len(queue.peek()) == queue.remove([2]) == 1
        every = queue.queue
        every.ensure("other", [(1, 0)])
        every.correct_heads()
        every.probe()
        assert every.stats().total == len(every.peek()) == len(every.reserve({LINE: 1, "other": 1}, 9).entries) == 1
        bound.execute_command("AUTH", "default", "")
    client.acl_deluser("bound")
