"""Setting -> client -> engine, for the two kinds of callers. Loads redis-py: imported at the first use of Redis.

A web request must not wait for Redis: its engine gives up after a quarter of a second and then, behind a circuit
breaker, does not even try for a while. A worker's engine waits for a second and has connections of its own, so that
neither starves the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from django_delayq.conf import Settings
from django_delayq.engine import Engine
from django_delayq.engine.calls import Caller
from django_delayq.engine.faults import Client
from django_delayq.engine.scripts import Call
from django_delayq.redis_clients.breaker import LIMIT_SECONDS, Breaker
from django_delayq.redis_clients.clients import Patience, make_client

PRODUCER: Final = Patience(connect=LIMIT_SECONDS, read=LIMIT_SECONDS, is_limit=True)
WORKER: Final = Patience(connect=1.0, read=1.0, health_check_interval=30)
"""A worker that waits for a silent Redis fires nothing meanwhile, and is to be two seconds late at most."""


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


def make_producer_engine(settings: Settings) -> ProducerEngine:
    """Make an engine for web requests. Opens no connection. Raises ConfigError for an address that is none."""
    return ProducerEngine(make_client(settings.redis, PRODUCER), prefix=settings.prefix, shards=settings.shards)


def make_worker_engine(settings: Settings) -> Engine:
    """Make an engine for one worker. Opens no connection. Raises ConfigError for an address that is none."""
    return Engine(make_client(settings.redis, WORKER), prefix=settings.prefix, shards=settings.shards)
