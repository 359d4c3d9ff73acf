"""`DELAYQ["REDIS"]` -> client -> engine: the only place where engines are made from Django's settings.

redis-py is loaded when the first engine is made: never without Redis, and in a web process with the first push.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.signals import setting_changed
from django.db import router

from django_delayq.conf import get_settings

if TYPE_CHECKING:
    from django_delayq.engine.engine import Engine

logger = logging.getLogger("django_delayq.redis")

_lock = threading.Lock()
_shared: dict[str, Engine | None] = {}
"""The engines of this process's web requests, by the database of the ledger (None: this ledger does without Redis)."""


def get_engine(using: str) -> Engine | None:
    """Return the engine for scheduling in database `using`: one per process, shared by its threads.

    None: there is no Redis, or this ledger has no prefix in it (see `_prefix_of`). The engines of several databases
    share their connections and their circuit breaker.

    Opens no connection. A call on the engine takes a quarter of a second at most, once: see `Breaker`. A new engine is
    made after a fork and after a change of settings. Raises ConfigError if `DELAYQ["REDIS"]` is not a valid address;
    the message contains no password.
    """
    try:
        return _shared[using]
    except KeyError:
        with _lock:
            if using not in _shared:
                _shared[using] = _new_engine(using)
            return _shared[using]


def _new_engine(using: str) -> Engine | None:
    settings, prefix = get_settings(), _prefix_of(using)
    if prefix is None:
        return None
    from django_delayq.engine.engine import Engine
    from django_delayq.redis_clients.breaker import GuardedCaller
    from django_delayq.redis_clients.clients import PRODUCER, make_client

    other = next(filter(None, _shared.values()), None)
    caller = other.caller if other else GuardedCaller(make_client(settings.redis, PRODUCER))
    return Engine(
        caller.client, prefix=prefix, shards=settings.shards, caller=caller, longest_lease_ms=_longest_lease_ms()
    )


def get_worker_engine(using: str) -> Engine | None:
    """Return a new engine for one worker of database `using`, with connections of its own. The caller closes it.

    None as for `get_engine`. It is not shared, because closing an engine stops its wake-ups: two workers of one
    process would end each other. Opens no connection. Raises ConfigError as `get_engine`.
    """
    settings, prefix = get_settings(), _prefix_of(using)
    if prefix is None:
        return None
    from django_delayq.engine.engine import Engine
    from django_delayq.redis_clients.clients import WORKER, make_client

    client = make_client(settings.redis, WORKER)
    return Engine(client, prefix=prefix, shards=settings.shards, longest_lease_ms=_longest_lease_ms())


def _longest_lease_ms() -> int:
    return int(get_settings().longest_lease.total_seconds() * 1000)


def _prefix_of(using: str) -> str | None:
    """Return the prefix of the ledger in database `using`; None without Redis, and with a warning if it has none.

    A single prefix belongs to the ledger that the routers choose. Another one must not use it, because the ids of two
    ledgers overlap: a worker would remove the entries of the other ledger as settled.
    """
    settings = get_settings()
    if settings.redis is None:
        return None
    prefix = settings.prefix
    if isinstance(prefix, str):
        prefix = {router.db_for_write(apps.get_model("django_delayq", "Timeout")): prefix}
    if using not in prefix:
        logger.warning(
            "DELAYQ['PREFIX'] has no prefix for database %r: its timeouts are not sent to Redis, and are found by its "
            "workers in the database. Give each database with timeouts a prefix of its own.",
            using,
            extra={"event": "prefix_missing", "database": using},
        )
    return prefix.get(using)


def forget_engine() -> None:
    """Close the engines of this process. The next call of `get_engine` makes a new one."""
    with _lock:
        engines = list(filter(None, _shared.values()))
        _shared.clear()
    for engine in engines:
        engine.close()


def _on_setting_changed(*, setting: str, **_: Any) -> None:
    if setting in {"DELAYQ", "CACHES", "DATABASE_ROUTERS"}:
        forget_engine()


def _after_fork() -> None:
    """Drop the connections of the parent process, and a lock that another thread held at the fork."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _shared.clear()


setting_changed.connect(_on_setting_changed, dispatch_uid="django_delayq.redis")
os.register_at_fork(after_in_child=_after_fork)
