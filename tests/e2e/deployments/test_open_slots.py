"""A slot whose move was aborted: timeouts fire nevertheless, and the log stays short."""

from __future__ import annotations

import pytest
from django.db import connection
from redis.crc import key_slot

from django_delayq.redis_clients import get_engine
from tests.e2e.deployments.conftest import Stage
from tests.engine.topologies import clustered
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="what Redis does is the same with each database"),
]
SHARDS = 3


def test_a_slot_left_half_way_is_told_of_once_and_makes_nothing_wait_for_it(stage: Stage) -> None:
    """Only one of its two keys exists, because no entry waits: Redis answers TRYAGAIN to commands with both."""
    with clustered(replicas=False) as nodes:
        stage.choose(nodes.url, shards=SHARDS)
        stage.start_worker()
        engine = get_engine("default")
        assert engine is not None
        migration = nodes.migrating(key_slot(engine.queue("default", 0).keys.heads.encode()))
        migration.begin()
        wait_until(lambda: "being moved to another node" in stage.worker.text, "the worker has noticed")
        for _ in range(3):
            stage.schedule(6, within=1.0)
            stage.await_all_fired_once_and_none_early()
        assert stage.worker.text.count("Redis is") == 1, "logged once for all attempts"
        migration.move_keys()
        migration.finish()
        stage.await_worker_on_redis()
        stage.schedule(6, within=1.0)
        stage.await_all_fired_once_and_none_early()
        assert "Redis is back" in stage.end_worker()[-1]
