"""`DELAYQ["REDIS"]` -> client -> engine: the only place where Django's settings and the engine meet.

redis-py is loaded when an engine is first made: never without Redis, and in a web process with the first push.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from django.core.signals import setting_changed

from django_delayq.conf import get_settings

if TYPE_CHECKING:
    from django_delayq.engine import Engine
    from django_delayq.redis_clients.engines import ProducerEngine

_lock = threading.Lock()
_shared: list[ProducerEngine | None] = []
"""Empty, or the one engine of this process's producers (None: there is no Redis)."""


def get_engine() -> ProducerEngine | None:
    """The engine for whoever schedules: one per process, shared by its threads; None without Redis.

    Opens no connection by itself, and a call on it takes a quarter of a second at most, once: see `Breaker`.
    Made anew after a fork and after a change of settings.

    Raises:
        ConfigError: `DELAYQ["REDIS"]` is no address; the message shows no password.
    """
    if not _shared:
        with _lock:
            if not _shared:
                _shared.append(_make_producer_engine())
    return _shared[0]


def get_worker_engine() -> Engine | None:
    """A new engine for one worker, with connections of its own; None without Redis. Whoever asked closes it.

    Not shared, because closing an engine stops all that listen through it: two workers of one process would end
    each other. Opens no connection by itself.

    Raises:
        ConfigError: as `get_engine`.
    """
    settings = get_settings()
    if settings.redis is None:
        return None
    from django_delayq.redis_clients.engines import make_worker_engine

    return make_worker_engine(settings)


def _make_producer_engine() -> ProducerEngine | None:
    settings = get_settings()
    if settings.redis is None:
        return None
    from django_delayq.redis_clients.engines import make_producer_engine

    return make_producer_engine(settings)


def forget_engine() -> None:
    """The producers' engine is closed; the next call of `get_engine` makes another."""
    with _lock:
        engine = _shared.pop() if _shared else None
    if engine is not None:
        engine.close()


def _on_setting_changed(*, setting: str, **_: Any) -> None:
    if setting in {"DELAYQ", "CACHES"}:
        forget_engine()


def _after_fork() -> None:
    """The child has neither its parent's connections nor a lock that another thread held at the fork."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _shared.clear()


setting_changed.connect(_on_setting_changed, dispatch_uid="django_delayq.connections")
os.register_at_fork(after_in_child=_after_fork)
