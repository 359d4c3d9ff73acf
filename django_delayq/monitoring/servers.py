"""Checks of the doctor that concern Redis and the clocks of servers: see `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Info, Warning
from django.utils.version import get_version_tuple

from django_delayq.conf import get_settings
from django_delayq.engine.scripts import translated
from django_delayq.exceptions import EngineError
from django_delayq.ledger.search import known_labels
from django_delayq.monitoring.snapshot import redis_status
from django_delayq.policy.policies import declared_queues
from django_delayq.redis_clients import get_engine
from django_delayq.sql.now import database_now
from django_delayq.times.clock import brief, duration_text, plural, to_ms

SKEW_WARNING_SECONDS: Final = 1.0
"""NTP keeps clocks within milliseconds. An answer may be late by some hundred."""
SKEW_ERROR_SECONDS: Final = 30.0
"""Below this nothing fires early, but deadlines that application code computes are wrong by the skew."""
MIN_REDIS: Final = (6, 2)
"""The scripts need ZMSCORE, which is new in it."""
MEMORY_WARNING: Final = 0.9
"""Redis needs some memory to answer; when it is full, timeouts are read from the database."""


def skew(name: str, clock: str, ahead: float) -> CheckMessage:
    """Return the finding for a clock that is `ahead` seconds ahead of the database's."""
    seconds = abs(ahead)
    if seconds < SKEW_WARNING_SECONDS:
        return Info(f"{clock} agrees with the database's.", id=name)
    kind = Error if seconds >= SKEW_ERROR_SECONDS else Warning
    text = f"{clock} is {brief(seconds)} {'ahead of' if ahead > 0 else 'behind'} the database's."
    return kind(text, hint="Synchronize both machines by NTP, such as timedatectl set-ntp true.", id=name)


def redis(using: str) -> Iterator[CheckMessage]:
    """Check that Redis is reachable, on time and in step with the ledger, and examine each of its servers."""
    engine = get_engine(using)
    if engine is None:
        yield Info("No Redis is configured: workers poll the database once a second.", id="redis")
        return
    status = redis_status(using, database_now(using))
    if not status.is_reachable:
        hint = "Start it, and try redis-cli ping. Meanwhile workers poll the database: timeouts are up to 1 s late."
        yield Error(status.error, hint=hint, id="redis")
        return
    yield Info("Redis answers.", id="redis")
    # Redis's clock wakes workers. They correct a small skew.
    now_ms = engine.queue("default", 0).stats().now_ms
    yield skew("redis.clock", "Redis's clock", (now_ms - to_ms(database_now(using))) / 1000)
    soon = f"due within {duration_text(get_settings().sweep_interval)}"
    count = plural(status.compared, f"timeout that is {soon}.", f"timeouts that are {soon}.")
    text = f"Redis has {status.compared - status.missing} of {count}"
    if not status.compared:
        text = f"No timeout is {soon}: there is nothing to compare with Redis."
    advice = "If a worker is running, its sweep adds them within seconds." if status.missing else None
    known = known_labels(using)
    if foreign := [name for each in engine.queues(declared_queues()) for name in each.foreign_heads(known)]:
        text += f" It has lines of no policy, such as {foreign[0][:100]!r}."
        advice = "Does another application write to it? A sweep removes them within a minute."
    yield (Warning if advice else Info)(text, hint=advice, id="redis.in_step")
    try:
        with translated(engine.client):
            info = engine.client.info()
    except EngineError as error:
        # Only this report needs INFO, so the ACL user that the docs recommend may not run it.
        text = f"Redis refused INFO, so version, memory and persistence are unknown. {error}"
        yield Warning(text, hint="To check them, allow the user INFO: ACL SETUSER ... +info", id="redis.info")
        return
    for server in redis_servers(info):
        yield from examine_redis_server(server)


def redis_servers(info: Any) -> list[dict[str, Any]]:
    """Split the answer to INFO by server: a cluster answers for each node."""
    nodes = [value for value in info.values() if isinstance(value, dict) and "redis_version" in value]
    return nodes or [info]


def examine_redis_server(info: dict[str, Any]) -> Iterator[CheckMessage]:
    """Check what one server answers to INFO."""
    version = str(info.get("redis_version", "0"))
    if get_version_tuple(version) < MIN_REDIS:
        yield Error(f"Redis {version} is too old.", hint="Use Redis 6.2 or newer, or Valkey.", id="redis.version")
    else:
        yield Info(f"Redis {info.get('valkey_version') or version}.", id="redis.version")
    policy = str(info.get("maxmemory_policy", ""))
    if policy.startswith("allkeys"):
        text = f"maxmemory-policy is {policy}: when memory is short, Redis evicts due times."
        hint = "CONFIG SET maxmemory-policy noeviction, or use a Redis that is not a cache."
        yield Error(text, hint=hint, id="redis.eviction")
    elif policy:
        yield Info(f"maxmemory-policy is {policy}: Redis evicts no due times.", id="redis.eviction")
    limit, used = int(info.get("maxmemory", 0) or 0), int(info.get("used_memory", 0) or 0)
    if limit and used > MEMORY_WARNING * limit:
        hint = "Add memory, or shorten HORIZON. The ledger keeps the timeouts that Redis refuses."
        yield Warning(f"{used / limit:.0%} of maxmemory are used.", hint=hint, id="redis.memory")
    # INFO reports snapshots unreliably: without a snapshot, "last save" is the start of the server.
    state = "on" if info.get("aof_enabled") else "off"
    text = f"Its append-only file is {state}; either is fine: the sweep refills an empty Redis."
    yield Info(text, id="redis.persistence")
