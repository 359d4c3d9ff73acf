"""A failover by Sentinel: the client finds the new master, and the wakeup listens to it."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from django_delayq.engine import Engine
from django_delayq.exceptions import EngineUnavailable
from tests.engine.redis_process import RedisProcess, await_true, sentinel

SLOWLY = 50.0
"""A sentinel looks around every ten seconds only."""


def is_served_by(engine: Engine, server: RedisProcess) -> bool:
    """Whether the engine's next entry lands on this server."""
    queue = engine.queue("default", 0)
    try:
        queue.ensure([(1, 5)])
    except EngineUnavailable:
        return False
    with server.client() as client:
        return bool(client.info("replication")["role"] == "master" and client.zcard(queue.keys.entries))


def is_failing_over(client: redis.Redis) -> bool:
    """Whether the sentinel has accepted to make the replica the master; it wants to know it for a while first."""
    try:
        return bool(client.execute_command("SENTINEL", "FAILOVER", "mymaster"))
    except redis.ResponseError:
        return False


def test_the_engine_and_its_wakeup_follow_a_failover(own_server: RedisProcess) -> None:
    master, master_client = own_server, own_server.client()
    with RedisProcess(master.binary) as replica, replica.client() as replica_client:
        master_client.config_set("repl-diskless-sync-delay", 0)
        replica_client.replicaof("127.0.0.1", master.port)
        await_true(lambda: replica_client.info("replication")["master_link_status"] == "up")
        with sentinel(master) as port:
            finder = Sentinel([("127.0.0.1", port)], socket_timeout=5)
            await_true(lambda: len(finder.discover_slaves("mymaster")) == 1)
            client = finder.master_for("mymaster", socket_timeout=5, retry=Retry(NoBackoff(), 0))
            engine = Engine(client)
            wakeup = engine.wakeup(["default"])
            wakeup.start()
            assert wakeup.wait(20)
            assert is_served_by(engine, master)
            await_true(lambda: is_failing_over(finder.sentinels[0]), SLOWLY)
            await_true(lambda: is_served_by(engine, replica), SLOWLY)
            await_true(lambda: len(replica_client.client_list(_type="pubsub")) > 1)  # the sentinel is the other one
            while wakeup.wait(0.2):
                pass
            engine.queue("default", 0).ensure([(2, 4)])
            assert wakeup.wait(20)
            engine.close()
            finder.sentinels[0].close()
        master_client.close()
