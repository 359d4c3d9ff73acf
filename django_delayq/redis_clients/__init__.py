"""`DELAYQ["REDIS"]` -> client -> engine: the only place where engines are made from Django's settings.

redis-py is loaded when the first engine is made: never without Redis, and in a web process with the first push.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from django.core.signals import setting_changed
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from django_delayq.conf import get_settings
from django_delayq.times.clock import aware

if TYPE_CHECKING:
    from django_delayq.engine.engine import Engine

_lock = threading.Lock()
_shared: dict[str, Engine | None] = {}
"""The engines of this process's web requests, by the database of the ledger (None: there is no Redis)."""
_created: dict[str, str] = {}
"""When the tables of each ledger were created, by alias. Read once in a process, as it does not change."""


def get_engine(using: str) -> Engine | None:
    """Return the engine for scheduling in database `using`: one per process, shared by its threads.

    None: there is no Redis. The engines of several databases share their connections and their circuit breaker.

    Opens no connection to Redis. A call on the engine takes a quarter of a second at most, once: see `Breaker`. A new
    engine is made after a fork and after a change of settings. Raises ConfigError if `DELAYQ["REDIS"]` is not a valid
    address, with a message that contains no password, and the first call the errors of the database: see `key_prefix`.
    """
    try:
        return _shared[using]
    except KeyError:
        if get_settings().redis is not None:
            key_prefix(using)  # not within the lock: threads that wait for it have the connections of a small pool
        with _lock:
            if using not in _shared:
                _shared[using] = _new_engine(using)
            return _shared[using]


def _new_engine(using: str) -> Engine | None:
    settings = get_settings()
    if settings.redis is None:
        return None
    from django_delayq.engine.engine import Engine
    from django_delayq.redis_clients.breaker import GuardedCaller
    from django_delayq.redis_clients.clients import PRODUCER, make_client

    other = next(filter(None, _shared.values()), None)
    caller = other.caller if other else GuardedCaller(make_client(settings.redis, PRODUCER))
    return Engine(
        caller.client,
        prefix=key_prefix(using),
        shards=settings.shards,
        caller=caller,
        longest_lease_ms=_longest_lease_ms(),
    )


def get_worker_engine(using: str) -> Engine | None:
    """Return a new engine for one worker of database `using`, with connections of its own. The caller closes it.

    None as for `get_engine`. It is not shared, because closing an engine stops its wake-ups: two workers of one
    process would end each other. Raises the errors of `get_engine`.
    """
    settings = get_settings()
    if settings.redis is None:
        return None
    from django_delayq.engine.engine import Engine
    from django_delayq.redis_clients.clients import WORKER, make_client

    client = make_client(settings.redis, WORKER)
    return Engine(client, prefix=key_prefix(using), shards=settings.shards, longest_lease_ms=_longest_lease_ms())


def _longest_lease_ms() -> int:
    return int(get_settings().longest_lease.total_seconds() * 1000)


def key_prefix(using: str) -> str:
    """Return the first part of all keys of the ledger in database `using`, such as "delayq:production.6432c0a1b2f4e".

    Ids of several ledgers overlap, so a worker would remove the entries of another ledger as settled. Therefore
    `PREFIX` is followed by `INSTALLATION`, in which copies of a database differ, and the time at which the tables of
    the ledger were created. A process with another prefix, such as one that runs while its database is replaced, only
    makes timeouts late, until the next sweep adds them. Raises the errors of the database.
    """
    if using not in _created:
        recorder, created = MigrationRecorder(connections[using]), ""
        if recorder.has_table():  # not in tests without migrations
            applied = recorder.migration_qs.filter(app="django_delayq").order_by("id").values_list("applied", flat=True)
            created = "".join(f"{int(aware(at).timestamp() * 1e6):x}" for at in applied[:1])
        _created[using] = created
    settings = get_settings()
    identity = ".".join(filter(None, [settings.installation, _created[using]]))
    return ":".join(filter(None, [settings.prefix, identity]))


def forget_engine() -> None:
    """Close the engines of this process. The next call of `get_engine` makes a new one."""
    with _lock:
        engines = list(filter(None, _shared.values()))
        _shared.clear()
    for engine in engines:
        engine.close()


def _on_setting_changed(*, setting: str, **_: Any) -> None:
    if setting in {"DELAYQ", "CACHES"}:
        forget_engine()


def _after_fork() -> None:
    """Drop the connections of the parent process, and a lock that another thread held at the fork."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _shared.clear()


setting_changed.connect(_on_setting_changed, dispatch_uid="django_delayq.redis")
os.register_at_fork(after_in_child=_after_fork)
