"""The engine as a whole: many queues and shards in one round trip, any client, and what closing leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import SLICES, Change, counter_key
from django_delayq.engine.scripts import Client
from django_delayq.exceptions import EngineError
from django_delayq.redis_clients.clients import WORKER, make_client
from tests.engine.lines import LINE, one_line
from tests.engine.redis_process import RedisProcess

FAR_MS = 2**41
HOUR_MS = 3_600_000


def walk_the_basic_path(engine: Engine) -> None:
    """Add 150 entries to two queues, move and remove some, and drain the rest."""
    engine.ping()
    wakeup = engine.wakeup(["a", "b c"])
    wakeup.start()
    assert wakeup.wait(20)
    engine.apply([Change(name, LINE, id, FAR_MS, earlier_only=True) for name in ("a", "b c") for id in range(1, 151)])
    assert wakeup.wait(20)
    engine.apply([Change("a", LINE, id, None) for id in range(1, 51)])
    engine.apply([Change("a", LINE, id, 0) for id in range(51, 151)])
    engine.apply([Change("b c", LINE, id, 0, earlier_only=True) for id in range(1, 151)])
    drained: dict[str, set[int]] = {"a": set(), "b c": set()}
    for name, ids in drained.items():
        for shard in range(engine.shards):
            queue = one_line(engine, name, shard)
            while (reserved := queue.reserve(40, 60_000)).lease:
                assert {engine.shard_of(entry.id) for entry in reserved.entries} == {shard}
                first, *rest = [entry.id for entry in reserved.entries]
                lease, count = queue.extend(reserved.lease, 60_000)
                assert count == len(rest) + 1
                assert queue.release(lease, [(first, 0)]) == 1
                assert queue.acknowledge(lease, rest) == len(rest)
                reserved = queue.reserve(1, 60_000)
                assert reserved.lease is not None
                ids |= {*rest, reserved.entries[0].id}
                assert queue.acknowledge(reserved.lease) == 1
            assert queue.stats().total == len(queue.peek()) == 0
    assert drained == {"a": set(range(51, 151)), "b c": set(range(1, 151))}
    wakeup.close()


@pytest.mark.parametrize(("protocol", "decode"), [(2, True), (3, False)])
def test_the_basic_path_runs_on_both_protocols_as_bytes_and_as_text(
    shared_server: RedisProcess, client: redis.Redis, protocol: int, decode: bool
) -> None:
    made: Any = make_client(f"redis://127.0.0.1:{shared_server.port}/0?protocol={protocol}", WORKER)
    made.connection_pool.connection_kwargs["decode_responses"] = decode
    engine = Engine(made, shards=2)
    walk_the_basic_path(engine)
    engine.close()


def test_all_changes_make_one_round_trip_and_none_make_none(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(client, shards=4)
    changes = [Change(name, LINE, id, id, id % 2 == 0) for name in "abc" for id in range(1, 400)]
    engine.apply(changes)
    sent: list[int] = []
    send_packed = redis.connection.AbstractConnection.send_packed_command

    def counting(self: redis.connection.Connection, command: object, check_health: bool = True) -> None:
        sent.append(1)
        send_packed(self, command, check_health)

    monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", counting)
    engine.apply(changes)
    engine.apply([])
    assert len(sent) == 1


def test_only_the_present_slice_and_the_complete_ones_before_it_count(client: redis.Redis) -> None:
    engine, key = Engine(client, prefix="p"), counter_key("p", "c")
    present = client.time()[0] * 1000 // HOUR_MS
    ages = {SLICES: 1000, SLICES - 1: 7, 1: 5, 0: 3, -1: 1000}
    client.set(key, " ".join(f"{present - age}:{count}" for age, count in ages.items()))
    assert engine.count("c", 2, HOUR_MS) == 7 + 5 + 3 + 2
    assert client.get(key) == f"{present - SLICES + 1}:7 {present - 1}:5 {present}:5".encode()
    assert 0 < client.pttl(key) <= SLICES * HOUR_MS
    client.set(key, b"\xff no counter")
    assert engine.count("c", 2, HOUR_MS) == 2, "foreign data counts as nothing"
    client.delete(key)
    client.zadd(key, {"member": 1})
    with pytest.raises(EngineError):
        engine.count("c", 2, HOUR_MS)
    assert client.zcard(key) == 1


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_closing_ends_wakeups_and_connections_and_may_be_repeated(own_server: RedisProcess) -> None:
    with own_server.client() as probe, own_server.client() as client:
        engine = Engine(client)
        wakeup = engine.wakeup(["q"])
        wakeup.start()
        assert wakeup.wait(20)
        engine.ping()
        engine.close()
        assert len(probe.client_list()) == 1
        engine.ping()
        own_server.kill()
        engine.close()
        engine.close()


@pytest.mark.slow
def test_the_basic_path_runs_everywhere(anywhere: Client) -> None:
    engine = Engine(anywhere, shards=8)
    walk_the_basic_path(engine)
    assert [engine.count("shop.order.cancel_unpaid:0", amount, HOUR_MS) for amount in (1, 2, 50)] == [1, 3, 53]
    assert engine.count("another", 1, HOUR_MS) == 1
    engine.close()


def test_lines_that_nobody_owns_are_removed(client: redis.Redis) -> None:
    (queue,) = Engine(client).queues(["a"])
    queue.ensure("own {line}", [(1, 5)])
    for name in (b"of.none", b"{brace", b"\xff", b"a" * 5000):
        client.zadd(queue.keys.heads, {name: -1})
        client.zadd(queue.keys.named("").encode() + name, {"1": 1})
    assert [queue.remove_foreign(["own {line}"]) for _ in range(2)] == [4, 0]
    assert client.zrange(queue.keys.heads, 0, -1) == [b"own%20%7Bline%7D"]
    assert not any(client.exists(queue.keys.named(name)) for name in ("of.none", "{brace"))
    assert queue.peek() == [(1, 5)]
