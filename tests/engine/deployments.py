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
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from django_delayq.engine.scripts import Client
from tests.engine.redis_process import RedisProcess
from tests.engine.topologies import clustered, watched
from tools.redis_binary import find_redis_servers

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
    return [*ALWAYS, *map(_name_of, find_redis_servers()[1:])]


@contextlib.contextmanager
def deployed(name: str) -> Iterator[Deployment]:
    """Start it."""
    if name == "sentinels":
        with watched() as servers:
            yield Deployment(name, lambda: client_of(servers.url))
    elif name == "cluster":
        with clustered() as nodes:
            yield Deployment(name, lambda: client_of(nodes.url))
    else:
        binary = next((binary for binary in find_redis_servers() if _name_of(binary) == name), None)
        with RedisProcess(binary) as server:
            yield Deployment(name, server.client)


def client_of(url: str) -> Client:
    """Return the client that the library makes for `url`, with time limits for a slow machine."""
    from django_delayq.redis_clients.clients import Timeouts, make_client  # reads Django's settings

    return make_client(url, Timeouts(SECONDS))


@cache
def _name_of(binary: Path) -> str:
    """Return the program and its version, as in `Redis 6.2.14`."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    kind, _, rest = said.partition(" server v=")
    return f"{kind} {rest.split()[0]}"
