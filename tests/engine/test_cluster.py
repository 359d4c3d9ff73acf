"""A cluster of three nodes: a slot on its way to another node, and a node that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.retry import Retry

from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineUnavailable
from tests.engine.lines import one_line
from tests.engine.topologies import Clustered, clustered

pytestmark = pytest.mark.slow

SHARDS = 8


@pytest.fixture(scope="module")
def nodes() -> Iterator[Clustered]:
    with clustered(replicas=False) as found:
        yield found


@pytest.fixture
def cluster(nodes: Clustered) -> Iterator[RedisCluster]:
    """A client that the project has made."""
    startup = [ClusterNode("127.0.0.1", node.port) for node in nodes.masters]
    client = RedisCluster(startup_nodes=startup, socket_timeout=5, decode_responses=True, retry=Retry(NoBackoff(), 1))
    client.flushall(target_nodes=RedisCluster.PRIMARIES)
    yield client
    client.close()


def test_while_only_one_of_its_keys_is_there_a_queue_whose_slot_is_on_its_way_gives_nothing_out(
    nodes: Clustered, cluster: RedisCluster
) -> None:
    """A probe fails too; otherwise a worker would alternate between success and failure."""
    queue = one_line(Engine(cluster, shards=SHARDS), "lopsided")
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
