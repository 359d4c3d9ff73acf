"""Servers and queues for the engine's tests. Nothing here needs Django."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import pytest
import redis

from django_delayq.engine.scripts import Client
from tests.engine.deployments import Deployment, deployed, deployments
from tests.engine.redis_process import NoRedisServer, RedisProcess
from tests.engine.virtual import VirtualQueue

T = TypeVar("T")


@contextmanager
def _or_skipped(make: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Run what `make` returns; skip the test without a server program, and fail it with `CI=true`."""
    try:
        with make() as made:
            yield made
    except NoRedisServer as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))


@pytest.fixture
def own_prefix() -> None:
    """Replace the fixture that sets the settings of the project, which the engine does not use."""


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisProcess]:
    """Yield a server for all tests that do not stop or reconfigure it."""
    with _or_skipped(RedisProcess) as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[RedisProcess]:
    """Yield a server for a test that kills, stalls or reconfigures it."""
    with _or_skipped(RedisProcess) as server:
        yield server


@pytest.fixture
def client(shared_server: RedisProcess) -> Iterator[redis.Redis]:
    """Yield a client of an empty server."""
    with shared_server.client() as client:
        client.flushall()
        yield client


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that needs only a client on every kind of Redis, each started once."""
    if "deployment" in metafunc.fixturenames:
        metafunc.parametrize("deployment", deployments(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """One of the ways in which Redis is run, and reached."""
    with _or_skipped(lambda: deployed(request.param)) as found:
        yield found


@pytest.fixture
def anywhere(deployment: Deployment) -> Iterator[Client]:
    """Yield a client of the empty deployment, made by the library."""
    client = deployment.client()
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def virtual(client: redis.Redis) -> VirtualQueue:
    """Return a queue with a virtual clock."""
    return VirtualQueue(client)
