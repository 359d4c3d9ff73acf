"""The engine as a whole: many queues and shards in one round trip, any client, and what closing leaves behind."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change, QueueKeys
from django_delayq.exceptions import EngineUnavailable
from tests.engine.lines import LINE, Entry, one_line
from tests.engine.redis_process import RedisProcess, binaries
from tools.servers import free_port

FAR_MS = 2**41


def walk_the_basic_path(engine: Engine) -> None:
    """Add 300 entries to two queues, move and remove some, and drain the rest."""
    engine.ping()
    wakeup = engine.wakeup(["a", "b c"])
    wakeup.start()
    assert wakeup.wait(20)
    engine.apply([Change(name, LINE, id, FAR_MS, earlier_only=True) for name in ("a", "b c") for id in range(1, 301)])
    assert wakeup.wait(20)
    engine.apply([Change("a", LINE, id, None) for id in range(1, 101)])
    engine.apply([Change("a", LINE, id, 0) for id in range(101, 301)])
    engine.apply([Change("b c", LINE, id, 0, earlier_only=True) for id in range(1, 301)])
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
    assert drained == {"a": set(range(101, 301)), "b c": set(range(1, 301))}
    wakeup.close()


@pytest.mark.parametrize("binary", binaries())
@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}], ids=["bytes", "text", "resp3"])
def test_the_basic_path_on_every_server_with_every_client(binary: str, shards: int, options: dict[str, Any]) -> None:
    with RedisProcess(binary) as server, server.client(**options) as client:
        engine = Engine(client, shards=shards)
        walk_the_basic_path(engine)
        engine.close()


def test_all_changes_make_one_round_trip(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(sent) == 1


def test_changes_of_one_id_are_made_in_their_order(client: redis.Redis) -> None:
    engine = Engine(client)
    queue = one_line(engine, "q")
    engine.apply(
        [
            Change("q", LINE, 1, 50),
            Change("q", LINE, 1, 40, earlier_only=True),
            Change("q", LINE, 1, 45, earlier_only=True),
        ]
    )
    assert queue.peek() == [(1, 40)]
    engine.apply(
        [
            Change("q", LINE, 1, None),
            Change("q", LINE, 1, 60, earlier_only=True),
            Change("q", LINE, 2, 5),
            Change("q", LINE, 2, None),
        ]
    )
    assert queue.peek() == [(1, 60)]


def test_no_changes_send_nothing() -> None:
    Engine(redis.Redis(port=free_port())).apply([])


def test_a_lease_breaks_when_the_due_time_is_set_and_not_when_it_is_only_ensured(client: redis.Redis) -> None:
    engine = Engine(client)
    queue = one_line(engine, "q")
    engine.apply([Change("q", LINE, 1, 0), Change("q", LINE, 2, 0)])
    lease = queue.reserve(2, 60_000).lease
    assert lease is not None
    engine.apply([Change("q", LINE, 1, 0, earlier_only=True), Change("q", LINE, 2, 0)])
    assert queue.reserve(5, 60_000).entries == (Entry(2, 1),)
    assert queue.acknowledge(lease) == 1


def test_a_queue_is_the_same_object_each_time(client: redis.Redis) -> None:
    engine = Engine(client, shards=2)
    assert engine.queue("q", 1) is engine.queue("q", 1)
    assert engine.queue("q", 1).keys == QueueKeys.of("delayq", "q", 1, 2)
    with pytest.raises(ValueError, match="shard"):
        engine.queue("q", 2)
    with pytest.raises(ValueError, match="1 shard or more"):
        Engine(client, shards=0)


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


@pytest.mark.parametrize("act", ["ping", "apply", "stats"])
def test_nobody_listening_is_unavailable(act: str) -> None:
    with redis.Redis(port=free_port(), retry=Retry(NoBackoff(), 0)) as client:
        engine = Engine(client)
        call = {"ping": engine.ping, "apply": lambda: engine.apply([Change("q", LINE, 1, 1)] * 3)}
        with pytest.raises(EngineUnavailable) as caught:
            call.get(act, one_line(engine, "q").stats)()
        assert isinstance(caught.value.__cause__, redis.ConnectionError)


def test_a_server_that_accepts_and_says_nothing_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = redis.Redis(port=silent.getsockname()[1], socket_timeout=0.1, retry=Retry(NoBackoff(), 0))
        with pytest.raises(EngineUnavailable):
            Engine(client).ping()
