"""A real worker while its Redis fails over or is resharded: everything fires once, and it comes back by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import connection
from redis.crc import key_slot

from django_delayq.redis_clients import get_engine
from tests.e2e.deployments.conftest import Stage
from tests.engine.topologies import Clustered, clustered, watched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="what Redis does is the same with each database"),
]
COUNT, SECONDS, SHARDS = 150, 6.0, 6


def ride(stage: Stage, change: Callable[[], object]) -> None:
    """Schedules before and during the change, and gives account of everything after it."""
    stage.start_worker()
    stage.schedule(COUNT, within=SECONDS)
    changing = threading.Thread(target=change)
    changing.start()
    stage.schedule(COUNT, within=SECONDS)
    changing.join(120)
    assert not changing.is_alive()
    stage.await_worker_on_redis()
    stage.schedule(10, within=0.5)
    stage.await_all_fired_once_and_none_early()
    told = stage.end_worker()
    assert all(("not available" in line) == (i % 2 == 0) for i, line in enumerate(told)), "away and back, in turns"
    assert len(told) % 2 == 0, "the last word is that it is back"


def test_sentinels_move_the_master(stage: Stage) -> None:
    with watched() as servers:
        stage.choose(servers.url)
        ride(stage, servers.kill_master)


def test_a_cluster_loses_a_master_moves_another_and_moves_slots(stage: Stage) -> None:
    with clustered() as nodes:
        stage.choose(nodes.url, shards=SHARDS)

        def change() -> None:
            nodes.kill_master(0)
            nodes.fail_over(1)
            move_all_shards(nodes)

        ride(stage, change)


def move_all_shards(nodes: Clustered) -> None:
    engine = get_engine("default")
    assert engine is not None
    for shard in range(SHARDS):
        migration = nodes.migrating(key_slot(engine.queue("default", shard).keys.heads.encode()))
        migration.begin()
        migration.move_keys()
        migration.finish()
