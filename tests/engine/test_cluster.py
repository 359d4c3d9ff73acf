"""A cluster of three nodes: all keys of one command in one slot, shards on every node, messages from any node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.exceptions import EngineUnavailable
from tests.engine.lines import LINE, one_line
from tests.engine.redis_process import NoRedisServer, RedisProcess, binaries, default_binary
from tests.engine.test_engine import walk_the_basic_path
from tests.engine.topologies import clustered
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SHARDS = 8


@pytest.fixture(scope="module", params=binaries())
def nodes(request: pytest.FixtureRequest) -> Iterator[list[RedisProcess]]:
    with clustered(request.param, replicas=False) as found:
        yield found.masters


def cluster_client(nodes: list[RedisProcess], **options: object) -> RedisCluster:
    startup = [ClusterNode("127.0.0.1", node.port) for node in nodes]
    return RedisCluster(startup_nodes=startup, socket_timeout=5, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("decode", [False, True])
def test_the_basic_path_runs_on_a_cluster(nodes: list[RedisProcess], decode: bool) -> None:
    client = cluster_client(nodes, decode_responses=decode)
    client.flushall(target_nodes=RedisCluster.PRIMARIES)
    client.script_flush()
    walk_the_basic_path(Engine(client, shards=SHARDS))
    client.close()


def test_a_round_trip_gets_past_forgotten_scripts_and_foreign_keys_on_every_node(nodes: list[RedisProcess]) -> None:
    client = cluster_client(nodes)
    client.flushall(target_nodes=RedisCluster.PRIMARIES)
    engine = Engine(client, shards=SHARDS)
    engine.apply([Change("q", LINE, id, 0) for id in range(1, 101)])
    client.script_flush()
    for shard in range(SHARDS):
        client.delete(one_line(engine, "q", shard).entries)
        client.set(one_line(engine, "q", shard).entries, "mine")
    engine.apply([Change("q", LINE, id, 5) for id in range(1, 101)])
    assert sum(one_line(engine, "q", shard).stats().total for shard in range(SHARDS)) == 100
    engine.close()


def test_a_lost_node_makes_its_shards_unavailable_and_is_found_again() -> None:
    try:
        default_binary()
    except NoRedisServer as missing:
        pytest.skip(str(missing))
    with clustered(replicas=False) as found:
        nodes = found.masters
        client = cluster_client(nodes, retry=Retry(NoBackoff(), 1))
        engine = Engine(client, shards=SHARDS)
        engine.apply([Change("q", LINE, id, 0) for id in range(1, 101)])
        nodes[1].kill()
        with pytest.raises(EngineUnavailable):
            engine.apply([Change("q", LINE, id, 1) for id in range(1, 101)])
        assert [answers(engine, shard) for shard in range(SHARDS)].count(False) in (2, 3)
        nodes[1].start()
        wait_until(lambda: is_applied(engine, [Change("q", LINE, id, 1) for id in range(1, 101)]))
        assert sum(one_line(engine, "q", shard).stats().total for shard in range(SHARDS)) == 100
        engine.close()


def answers(engine: Engine, shard: int) -> bool:
    """Whether the shard's node is available."""
    try:
        one_line(engine, "q", shard).stats()
    except EngineUnavailable:
        return False
    return True


def is_applied(engine: Engine, changes: list[Change]) -> bool:
    """Whether the engine is available again."""
    try:
        engine.apply(changes)
    except EngineUnavailable:
        return False
    return True
