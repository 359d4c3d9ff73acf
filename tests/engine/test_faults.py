"""What the engine does when Redis refuses: its memory is full, it is a replica, a right is missing, a slot is moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.retry import Retry

from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineError, EngineUnavailable
from tests.engine.lines import OneLine, one_line
from tests.engine.redis_process import RedisProcess
from tests.engine.topologies import clustered
from tools.redis_binary import find_redis_servers
from tools.servers import free_port

pytestmark = pytest.mark.slow


def drain_at_full_memory(client: redis.Redis, queue: OneLine) -> None:
    """Add entries, fill the memory, and resolve all entries in every possible way."""
    queue.ensure([(id, 0) for id in range(1, 101)])
    lease = queue.reserve(50, 60_000).lease
    assert lease is not None
    client.config_set("maxmemory", 1)
    lease, count = queue.extend(lease, 60_000)
    assert count == 50
    assert queue.release(lease, [(1, 5), (2, 5)]) == 2
    assert queue.acknowledge(lease, [3]) == 1
    assert queue.acknowledge(lease) == 47
    assert queue.remove([4, 5, 60]) == 1
    drained = queue.reserve(1000, 60_000)
    assert len(drained.entries) == 51
    assert drained.lease is not None
    assert queue.acknowledge(drained.lease) == 51


@pytest.mark.parametrize("binary", find_redis_servers(), ids=str)
def test_out_of_memory_stops_adding_and_a_replica_is_unavailable_until_it_is_a_master(binary: Path) -> None:
    with RedisProcess(binary, extra=["--maxmemory-policy", "noeviction"]) as server, server.client() as client:
        queue = one_line(Engine(client))
        drain_at_full_memory(client, queue)
        for add in [queue.ensure, queue.reschedule]:
            with pytest.raises(EngineUnavailable, match="memory"):
                add([(900, 1)])
        client.config_set("maxmemory", 0)
        assert queue.ensure([(900, 1)]) == 1
        client.replicaof("127.0.0.1", str(free_port()))
        before = client.client_id()
        with pytest.raises(EngineUnavailable):
            queue.ensure([(1, 0)])
        assert client.client_id() != before, "the next command looks up the server again"
        with pytest.raises(EngineUnavailable):
            queue.reserve(1, 1000)
        client.replicaof("NO", "ONE")
        assert queue.ensure([(1, 0)]) == 1


def test_a_refused_command_is_told_apart_from_a_server_that_is_away(client: redis.Redis) -> None:
    client.acl_setuser("reader", enabled=True, passwords=["+x"], categories=["+@all"], commands=["-zadd"], keys=["*"])
    with client.client() as single:
        single.execute_command("AUTH", "reader", "x")
        with pytest.raises(EngineError) as refused:
            one_line(Engine(single)).ensure([(1, 1)])
        assert not isinstance(refused.value, EngineUnavailable)
        single.execute_command("AUTH", "default", "")
    client.acl_deluser("reader")


def test_while_only_one_of_its_keys_is_there_a_queue_whose_slot_is_on_its_way_gives_nothing_out() -> None:
    """A probe fails too; otherwise a worker would alternate between success and failure."""
    with clustered(replicas=False) as nodes:
        startup = [ClusterNode("127.0.0.1", node.port) for node in nodes.masters]
        retry = Retry(NoBackoff(), 1)
        with closing(
            RedisCluster(startup_nodes=startup, socket_timeout=5, decode_responses=True, retry=retry)
        ) as client:
            queue = one_line(Engine(client, shards=8), "lopsided")
            queue.ensure([(1, 1)])
            queue.probe()
            migration = nodes.migrating(key_slot(queue.entries.encode()))
            migration.begin()
            takings: list[Callable[[], object]] = [lambda: queue.reserve(5, 60_000), queue.probe]
            for take in takings:
                with pytest.raises(EngineUnavailable, match="a slot of the cluster is being moved"):
                    take()
            assert queue.ensure([(1, 0)]) == 1
            assert migration.move_keys() == 2
            migration.finish()
            queue.probe()
            assert [entry.id for entry in queue.reserve(5, 60_000).entries] == [1]
