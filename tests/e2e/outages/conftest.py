"""An unavailable Redis, and a breaker with a stopped clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from django_delayq.engine.engine import Engine
from django_delayq.redis_clients import forget_engine, get_engine
from django_delayq.redis_clients.breaker import Breaker, GuardedCaller
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pytest_django import Settings


once = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="it is the same on every database, and tried on PostgreSQL alone"
)


@dataclass
class Seconds:
    """The breaker's clock: so that no pause ends while a slow machine is still at work."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


def breaker_of(engine: Engine) -> Breaker:
    assert isinstance(engine.caller, GuardedCaller)
    return engine.caller.breaker


@pytest.fixture
def use_redis(settings: Settings, seconds: Seconds) -> Iterator[Callable[[str], Engine]]:
    """Use the Redis at this URL, behind a breaker with the clock `seconds`; return the engine."""

    def use(url: str) -> Engine:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": url}
        engine = get_engine("default")
        assert engine is not None
        breaker = breaker_of(engine)
        breaker._clock = breaker._backoff.monotonic = seconds
        return engine

    yield use
    forget_engine()


def await_redis_calls() -> None:
    """Wait until no call to Redis is running, including calls whose caller no longer waits."""
    wait_until(lambda: "delayq-redis-call" not in {thread.name for thread in threading.enumerate()})
