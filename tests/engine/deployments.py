"""The ways in which Redis is run and reached, for tests that must pass on each.

| name | what |
| --- | --- |
| single | one server, by its unix socket |
| sentinels | 1 master, 2 replicas, 3 sentinels, by `redis+sentinel://` |
| cluster | 3 masters, 3 replicas, by `redis+cluster://` |
| Redis 6.2.14, Valkey 9.1.2 ... | one server of each further version that this machine has |

`DELAYQ_TEST_DEPLOYMENTS="single,cluster"` names some of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from django_delayq.engine.scripts import Client
from tests.engine.redis_process import RedisProcess, binaries, name_of
from tests.engine.topologies import clustered, watched

ALWAYS = ("single", "sentinels", "cluster")
SECONDS = 20.0


@dataclass(frozen=True)
class Deployment:
    """A running Redis of some kind; `client` makes a new client of it."""

    name: str
    client: Callable[[], Client]


def deployments() -> list[str]:
    """Return the names of all deployments that this machine can run."""
    if named := os.environ.get("DELAYQ_TEST_DEPLOYMENTS"):
        return [name.strip() for name in named.split(",")]
    return [*ALWAYS, *(name_of(binary) for binary in binaries()[1:])]


@contextlib.contextmanager
def deployed(name: str) -> Iterator[Deployment]:
    """Start it. Raises NoRedisServer without a server program."""
    if name == "sentinels":
        with watched() as servers:
            yield Deployment(name, lambda: client_of(servers.url))
    elif name == "cluster":
        with clustered() as nodes:
            yield Deployment(name, lambda: client_of(nodes.url))
    else:
        binary = next((binary for binary in binaries() if name_of(binary) == name), None)
        with RedisProcess(binary) as server:
            yield Deployment(name, server.client)


def client_of(url: str) -> Client:
    """Return the client that the library makes for `url`, with time limits for a slow machine."""
    from django_delayq.redis_clients.clients import Timeouts, make_client  # reads Django's settings

    return make_client(url, Timeouts(SECONDS))
