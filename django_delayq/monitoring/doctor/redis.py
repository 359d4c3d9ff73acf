"""Redis: reachable, new enough, not evicting, in time, and in step with the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django_delayq.clock import database_now, to_ms
from django_delayq.engine.faults import translated
from django_delayq.exceptions import EngineError
from django_delayq.monitoring.doctor.databases import skew
from django_delayq.monitoring.doctor.findings import Finding, error, ok, warning
from django_delayq.monitoring.redis import redis_status
from django_delayq.redis_clients import get_engine

OLDEST: Final = (6, 2)
FULL: Final = 0.9


def server(using: str) -> Iterator[Finding]:
    """Each server behind the setting: its version, what it does when memory is short, and its persistence."""
    engine = get_engine()
    if engine is None:
        yield ok("redis", "None is configured: workers read the ledger once a second.")
        return
    try:
        engine.ping()
    except EngineError as failure:
        hint = "Workers read the ledger meanwhile, so timeouts are up to a second late. Bring it back."
        yield error("redis", str(failure), hint)
        return
    yield ok("redis", "It answers.")
    try:
        with translated(engine.client):
            told = engine.client.info()
    except EngineError as failure:
        # Nothing but this report needs the command, so the user that the docs recommend does not have it.
        text = f"It does not answer INFO, so version, memory and persistence are unknown. {failure}"
        yield warning("redis.info", text, "To see them here, allow the user the command: ACL SETUSER ... +info")
        return
    for facts in _servers(told):
        yield from _of_server(facts)


def _servers(told: Any) -> list[dict[str, Any]]:
    """A cluster answers node by node."""
    nodes = [value for value in told.values() if isinstance(value, dict) and "redis_version" in value]
    return nodes or [told]


def _of_server(facts: dict[str, Any]) -> Iterator[Finding]:
    version = str(facts.get("redis_version", "0"))
    known = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if known < OLDEST:
        yield error("redis.version", f"Redis {version} is too old.", "6.2 at least, or Valkey.")
    else:
        yield ok("redis.version", f"Redis {facts.get('valkey_version') or version}.")
    policy = str(facts.get("maxmemory_policy", ""))
    if policy.startswith("allkeys"):
        text = f"maxmemory-policy is {policy}: short of memory, it throws out due times."
        yield error("redis.eviction", text, "CONFIG SET maxmemory-policy noeviction, or a Redis without a cache in it.")
    elif policy:
        yield ok("redis.eviction", f"maxmemory-policy is {policy}: due times stay.")
    limit, used = int(facts.get("maxmemory", 0) or 0), int(facts.get("used_memory", 0) or 0)
    if limit and used > FULL * limit:
        text = f"{used / limit:.0%} of maxmemory are used."
        yield warning("redis.memory", text, "More memory, or a shorter HORIZON. What it refuses, the ledger keeps.")
    # Of snapshots INFO tells nothing that can be relied on: "last save" is the server's start if there never was one.
    words = "on" if facts.get("aof_enabled") else "off"
    yield ok("redis.persistence", f"Its append-only file is {words}; either is fine: the sweep fills an emptied Redis.")


def clock(using: str) -> Iterator[Finding]:
    """Whether Redis's clock, which wakes workers, agrees with the database's. They make up for it, up to a point."""
    engine = get_engine()
    if engine is None:
        return
    try:
        stats = engine.queue("default", 0).stats()
    except EngineError:
        return  # told by `server`
    yield skew("redis.clock", "Redis's clock", (stats.now_ms - to_ms(database_now(using))) / 1000)


def in_step(using: str) -> Iterator[Finding]:
    """Whether it knows what falls due next."""
    seen = redis_status(using, database_now(using))
    if not seen.is_reachable:
        return
    text = f"Of the {seen.compared} timeouts that fall due next it knows {seen.compared - seen.missing}."
    if seen.missing:
        yield warning("redis.in_step", text, "A sweep makes that good within seconds, if a worker lives.")
    else:
        yield ok("redis.in_step", text)
