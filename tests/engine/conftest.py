"""Servers and queues for the engine's tests. Nothing here needs Django."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from tests.engine.redis_process import NoRedisServer, RedisProcess
from tests.engine.virtual import VirtualQueue


def _started() -> RedisProcess:
    try:
        server = RedisProcess()
    except NoRedisServer as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))
    server.start()
    return server


@pytest.fixture
def own_prefix() -> None:
    """Takes the place of the fixture that sets the project's settings: nothing here knows them."""


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisProcess]:
    """A server for all tests that leave it running and configured as it was."""
    server = _started()
    yield server
    server.close()


@pytest.fixture
def own_server() -> Iterator[RedisProcess]:
    """A server for a test that kills, stalls or configures it."""
    server = _started()
    yield server
    server.close()


@pytest.fixture
def client(shared_server: RedisProcess) -> Iterator[redis.Redis]:
    """A client of an empty server."""
    with shared_server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def virtual(client: redis.Redis) -> VirtualQueue:
    """A queue on a clock of its own."""
    return VirtualQueue(client)
