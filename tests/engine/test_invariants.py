"""What always holds and no sequence of few commands shows: many workers, real connections, a million entries."""

from __future__ import annotations

import random
import threading

import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from tests.engine.lines import LINE, Entry, lease_of, one_line, token_of
from tests.engine.redis_process import RedisProcess, binaries
from tests.engine.virtual import START_MS, VirtualQueue
from tests.support.examples import examples
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

TOP_MS = 2**42 - 1


def test_many_workers_at_once_never_hold_the_same_entry(shared_server: RedisProcess, client: redis.Redis) -> None:
    one_line(Engine(client)).ensure([(id, 0) for id in range(1, 4001)])
    taken: list[int] = []

    def drain() -> None:
        with shared_server.client() as own:
            queue = one_line(Engine(own))
            while (reserved := queue.reserve(7, 60_000)).lease:
                taken.extend(entry.id for entry in reserved.entries)
                queue.acknowledge(reserved.lease)

    threads = [threading.Thread(target=drain) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 4001))


def test_a_waiting_worker_learns_of_every_earlier_due_time(client: redis.Redis) -> None:
    engine = Engine(client)
    queue = one_line(engine)
    wakeup = engine.wakeup(["default"])
    wakeup.start()
    assert wakeup.wait(20)
    rng = random.Random(10)
    for due_ms in sorted(rng.sample(range(TOP_MS), 200), reverse=True):
        engine.apply([Change("default", LINE, rng.randrange(1, 50), due_ms, earlier_only=rng.random() < 0.5)])
        assert queue.stats().next_due_ms == due_ms
        assert wakeup.wait(20), "the worker would have slept past it"
        assert not wakeup.wait(0), "one change is one wake-up"
    wakeup.close()


def test_no_script_touches_more_than_a_thousand_of_a_million_members(client: redis.Redis) -> None:
    queue = one_line(Engine(client))
    fill = "for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do redis.call('ZADD', KEYS[1], 1024, ARGV[3] .. i) end"
    for first in range(1, 1_000_001, 50_000):
        client.eval(fill, 1, queue.entries, first, first + 49_999, "" if first <= 500_000 else "junk")
    assert queue.stats().due == 1_000_000
    seen: set[int] = set()
    for _ in range(3):
        reserved = queue.reserve(1_000_000, 60_000)
        assert len(reserved.entries) == 1000
        seen |= {entry.id for entry in reserved.entries}
        assert reserved.lease is not None
        assert queue.acknowledge(reserved.lease) == 1000
    assert len(seen) == 3000
    client.zremrangebylex(queue.entries, "-", "(j")
    for _ in range(3):
        assert queue.reserve(1_000_000, 60_000).discarded == 1000
    assert queue.stats().total == 500_000 - 3000
    assert len(queue.peek(1_000_000)) <= 500
    client.delete(queue.entries)


def test_more_than_a_thousand_arguments_are_several_commands_in_one_round_trip(client: redis.Redis) -> None:
    queue = one_line(Engine(client))
    entries = [(id, 0) for id in range(1, 2501)]
    queue.ensure(entries[:1])
    lease = queue.reserve(1, 60_000).lease
    assert lease is not None
    queue.acknowledge(lease, [1])
    lease = lease_of(token_of(lease), ids=range(1, 2501))
    queue.reschedule([])
    for act in [
        lambda: queue.ensure(entries),
        lambda: queue.reschedule(entries),
        lambda: queue.acknowledge(lease, range(1, 2501)),
        lambda: queue.release(lease, entries),
        lambda: queue.remove(range(1, 2501)),
    ]:
        act()
        client.config_resetstat()
        act()
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 3


@examples(150)
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


@pytest.mark.parametrize("binary", binaries())
@pytest.mark.parametrize("persistence", ["snapshot", "log"])
def test_scores_survive_a_restart_and_replication(binary: str, persistence: str) -> None:
    with RedisProcess(binary) as server, RedisProcess(binary) as replica, server.client() as client:
        client.config_set("appendonly", "yes" if persistence == "log" else "no")
        client.config_set("repl-diskless-sync-delay", 0)
        virtual = VirtualQueue(client)
        virtual.queue.ensure([(1, TOP_MS), (2, 0), (3, START_MS), (2**63 - 1, START_MS)])
        virtual.queue.reserve(3, 86_400_000)
        before = virtual.scores()
        with replica.client() as copy:
            copy.replicaof("127.0.0.1", server.port)
            wait_until(lambda: copy.info("replication")["master_link_status"] == "up")
            client.wait(1, 5000)
            assert VirtualQueue(client).scores() == before
            assert {int(id): int(score) for id, score in copy.zrange(virtual.entries, 0, -1, withscores=True)} == before
        if persistence == "snapshot":
            wait_until(lambda: not client.info("persistence")["rdb_bgsave_in_progress"])  # the replica's
            client.save()
        else:
            wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
            server.extra = ("--appendonly", "yes")
        server.restart()
        wait_until(lambda: VirtualQueue(client).scores() == before)


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
