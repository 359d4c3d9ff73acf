"""`DELAYQ["REDIS"]` -> client -> engine: the only place where Django's settings and the engine meet.

Two kinds of engine, because two kinds of callers wait for Redis. A web request must not: its engine gives up after a
quarter of a second and then, behind a circuit breaker, does not even try for a while. A worker has nothing better to
do: its engine waits for a second and has connections of its own, so that neither starves the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeVar

from django.core.signals import setting_changed

from django_delayq.conf import get_settings
from django_delayq.connections.breaker import LIMIT_SECONDS, Breaker
from django_delayq.connections.clients import Patience, make_client
from django_delayq.engine import Engine
from django_delayq.engine.calls import Caller
from django_delayq.engine.faults import Client
from django_delayq.engine.scripts import Call

E = TypeVar("E", bound=Engine)

PRODUCER: Final = Patience(connect=LIMIT_SECONDS, read=LIMIT_SECONDS, is_limit=True)
WORKER: Final = Patience(connect=1.0, read=1.0, health_check_interval=30)
"""A worker that waits for a silent Redis fires nothing meanwhile, and is to be two seconds late at most."""

_lock = threading.Lock()
_shared: list[ProducerEngine | None] = []
"""Empty, or the one engine of this process's producers (None: there is no Redis)."""


class ProducerEngine(Engine):
    """An engine whose calls fail at once, without asking Redis, while its circuit breaker is open.

    `ping` always asks.
    """

    def __init__(self, client: Client, *, prefix: str, shards: int) -> None:
        super().__init__(client, prefix=prefix, shards=shards)
        self.breaker = Breaker()
        self._caller = _GuardedCaller(client, self.breaker)


class _GuardedCaller(Caller):
    def __init__(self, client: Client, breaker: Breaker) -> None:
        super().__init__(client)
        self._breaker = breaker

    def send(self, calls: Sequence[Call]) -> list[Any]:
        return self._breaker.call(partial(super().send, calls))


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
                _shared.append(_make(ProducerEngine, PRODUCER))
    return _shared[0]


def get_worker_engine() -> Engine | None:
    """A new engine for one worker, with connections of its own; None without Redis. Whoever asked closes it.

    Not shared, because closing an engine stops all that listen through it: two workers of one process would end
    each other. Opens no connection by itself.

    Raises:
        ConfigError: as `get_engine`.
    """
    return _make(Engine, WORKER)


def _make(kind: type[E], patience: Patience) -> E | None:
    settings = get_settings()
    if settings.redis is None:
        return None
    return kind(make_client(settings.redis, patience), prefix=settings.prefix, shards=settings.shards)


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
