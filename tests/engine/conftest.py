"""Servers and queues for the engine's tests. Nothing here needs Django."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from django_delayq.engine.scripts import Client
from tests.engine.deployments import Deployment, deployed, deployments
from tests.engine.redis_process import RedisProcess
from tests.engine.virtual import VirtualQueue
from tools.servers import RedisServer


@pytest.fixture(scope="session", autouse=True)
def _server_program() -> None:
    """Skip the tests without a server program, and fail them with `CI=true`."""
    if missing := RedisServer.missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


@pytest.fixture
def own_prefix() -> None:
    """Replace the fixture that sets the settings of the project, which the engine does not use."""


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisProcess]:
    """Yield a server for all tests that do not stop or reconfigure it."""
    with RedisProcess() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[RedisProcess]:
    """Yield a server for a test that kills, stalls or reconfigures it."""
    with RedisProcess() as server:
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
    with deployed(request.param) as found:
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
