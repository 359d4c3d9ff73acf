"""`DELAYQ["REDIS"]` -> client -> engine: the only place where Django's settings and the engine meet.

redis-py is loaded when the first engine is made: never without Redis, and in a web process with the first push.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from django.core.signals import setting_changed

from django_delayq.conf import get_settings

if TYPE_CHECKING:
    from django_delayq.engine import Engine
    from django_delayq.redis_clients.clients import ProducerEngine

_lock = threading.Lock()
_shared: list[ProducerEngine | None] = []
"""Empty, or the engine of this process's web requests (None: without Redis)."""


def get_engine() -> ProducerEngine | None:
    """Return the engine for scheduling: one per process, shared by its threads; None without Redis.

    Opens no connection. A call on the engine takes a quarter of a second at most, once: see `Breaker`. A new engine is
    made after a fork and after a change of settings. Raises ConfigError if `DELAYQ["REDIS"]` is not a valid address;
    the message contains no password.
    """
    if not _shared:
        with _lock:
            if not _shared:
                engine, settings = None, get_settings()
                if settings.redis is not None:
                    from django_delayq.redis_clients.clients import PRODUCER, ProducerEngine, make_client

                    client = make_client(settings.redis, PRODUCER)
                    engine = ProducerEngine(client, prefix=settings.prefix, shards=settings.shards)
                _shared.append(engine)
    return _shared[0]


def get_worker_engine() -> Engine | None:
    """Return a new engine for one worker, with connections of its own; None without Redis. The caller closes it.

    It is not shared, because closing an engine stops its wake-ups: two workers of one process would end each other.
    Opens no connection. Raises ConfigError as `get_engine`.
    """
    settings = get_settings()
    if settings.redis is None:
        return None
    from django_delayq.engine import Engine
    from django_delayq.redis_clients.clients import WORKER, make_client

    return Engine(make_client(settings.redis, WORKER), prefix=settings.prefix, shards=settings.shards)


def forget_engine() -> None:
    """Close the engine of this process. The next call of `get_engine` makes a new one."""
    with _lock:
        engine = _shared.pop() if _shared else None
    if engine is not None:
        engine.close()


def _on_setting_changed(*, setting: str, **_: Any) -> None:
    if setting in {"DELAYQ", "CACHES"}:
        forget_engine()


def _after_fork() -> None:
    """Drop the connections of the parent process, and a lock that another thread held at the fork."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _shared.clear()


setting_changed.connect(_on_setting_changed, dispatch_uid="django_delayq.connections")
os.register_at_fork(after_in_child=_after_fork)
