"""Workers in threads of the test's process, with Redis and without."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from pytest_django import Settings

from django_delayq.engine.engine import Engine
from django_delayq.firing.state import firing_state
from django_delayq.redis_clients import forget_engine
from tests.engine.redis_process import RedisProcess
from tests.support.workers import RunningWorker, StartWorker, worker_engine


@pytest.fixture(autouse=True)
def as_in_a_new_process(caplog: pytest.LogCaptureFixture) -> None:
    """No test inherits what another one has learned or logged. Ends of outages are logged at INFO, see `events`."""
    firing_state.forget()
    caplog.set_level(logging.INFO, "django_delayq.worker")


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Start a worker in a thread; stopped when the test ends."""
    started: list[RunningWorker] = []

    def start(**options: Any) -> RunningWorker:
        running = RunningWorker(**options)
        started.append(running)
        return running

    yield start
    for running in started:
        if running.is_running:
            running.stop()


@pytest.fixture
def with_redis(redis_client: redis.Redis) -> Iterator[redis.Redis]:
    """The test runs with Redis, and its client is at hand."""
    yield redis_client
    forget_engine()


@pytest.fixture
def engine(with_redis: redis.Redis) -> Iterator[Engine]:
    with worker_engine() as made:
        yield made


@pytest.fixture
def own_redis(settings: Settings) -> Iterator[RedisProcess]:
    """A Redis that the test may stop, with a sweep that is not waited for long."""
    with RedisProcess() as server:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": server.url, "SWEEP_INTERVAL": timedelta(milliseconds=200)}
        yield server
        forget_engine()
