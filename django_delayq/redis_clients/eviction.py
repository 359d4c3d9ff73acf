"""Whether Redis throws out due times when it is short of memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from redis.cluster import RedisCluster

from django_delayq.engine import Engine
from django_delayq.engine.faults import translated
from django_delayq.exceptions import EngineError
from django_delayq.redis_clients.breaker import LIMIT_SECONDS
from django_delayq.redis_clients.errands import Errand, NotBack


def evicting_policy(engine: Engine) -> str | None:
    """The `maxmemory-policy` of a server behind `engine` that may throw out our keys; None: of none.

    The policies for volatile keys are none of these, as entries do not expire. None too if Redis refuses, or has not
    answered within a quarter of a second: there are others to say that it is away.
    """
    try:
        policies = Errand(partial(_policies, engine)).wait(LIMIT_SECONDS)
    except (EngineError, NotBack):
        return None
    return next((policy for policy in policies if policy.startswith("allkeys-")), None)


def _policies(engine: Engine) -> list[str]:
    client: Any = engine.client
    with translated(client):
        if isinstance(client, RedisCluster):
            told = client.info("memory", target_nodes=RedisCluster.PRIMARIES)
            # One node's answer comes bare, those of several by their names.
            nodes = [told] if "maxmemory_policy" in told else list(told.values())
        else:
            nodes = [client.info("memory")]  # not CONFIG, which rented servers refuse
    return [str(node.get("maxmemory_policy", "")) for node in nodes]
