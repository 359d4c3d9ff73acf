"""A database server of the test's own, which it may restart and reaches through a proxy; and workers with logs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection

import django_delayq as dq
from django_delayq import redis_clients
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine
from tests.conftest import ROOT
from tests.engine.fault_proxy import FaultProxy
from tests.support.processes import LoggedWorker, StartLogged
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order
from tools import processes
from tools.servers import MariadbServer, PostgresServer, Server

SERVERS: dict[str, tuple[type[Server], str]] = {
    "postgresql": (PostgresServer, "DELAYQ_TEST_POSTGRESQL_URL"),
    "mysql": (MariadbServer, "DELAYQ_TEST_MARIADB_URL"),
}
SHORT = {"HORIZON": 2.0, "SWEEP_INTERVAL": 1.0, "SYNC_INTERVAL": 2.0, "LEASE": 3.0}


@dataclass
class OwnDatabase:
    """A server with the tests' tables in it; this process's default connection leads there."""

    server: Server
    proxy: FaultProxy
    environment: dict[str, str]

    def stop(self, *, at_once: bool = False) -> None:
        """In order, with the clients thrown out; or `at_once`: as after a power cut."""
        connection.close()
        assert self.server.process is not None
        if at_once and connection.vendor == "postgresql":
            processes.stop(self.server.process, first=signal.SIGQUIT)
            self.server.process = None
        elif at_once:
            self.server.kill()
        else:
            self.server.stop()

    def start(self) -> None:
        self.server.start()


@pytest.fixture
def own_database(child_environment: dict[str, str], transactional_db: None) -> Iterator[OwnDatabase]:
    kind, variable = SERVERS[connection.vendor]
    connection.close()
    before = {name: connection.settings_dict[name] for name in ("HOST", "PORT", "USER", "PASSWORD", "NAME")}
    with (
        tempfile.TemporaryDirectory() as directory,  # a server that runs under another account cannot enter `tmp_path`
        kind(_open_to_all(Path(directory)) / "server") as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        name = server.url.rpartition("/")[2]
        user = server.url.partition("//")[2].partition("@")[0]
        own = {"HOST": "127.0.0.1", "PORT": str(server.port), "USER": user, "PASSWORD": "", "NAME": name}
        environment = {
            **child_environment,
            variable: server.url.replace(f":{server.port}/", f":{proxy.port}/"),
            "DELAYQ_TEST_DB_NAME": name,
        }
        migrate = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"]
        subprocess.run(migrate, env=environment, cwd=ROOT, check=True)
        _lead_to(own)
        try:
            yield OwnDatabase(server, proxy, environment)
        finally:
            connection.close()
            _lead_to(before)


def _lead_to(settings: dict[str, str]) -> None:
    connection.settings_dict.update(settings)
    # Their ids differ. With those of this server, later tests would arm second timeouts beside those of the workers.
    ContentType.objects.clear_cache()
    # So does what the keys in Redis begin with: a push of this process would not reach the worker's.
    redis_clients._created.clear()
    forget_engine()


def _open_to_all(directory: Path) -> Path:
    directory.chmod(0o711)
    return directory


Start = Callable[..., LoggedWorker]


@pytest.fixture
def start(start_logged: StartLogged) -> Start:
    """Start a worker that logs warnings; `seconds` are settings, and keywords its environment."""

    def start(*arguments: str, seconds: dict[str, float] = SHORT, **environment: str) -> LoggedWorker:
        environment = {**environment, "DELAYQ_TEST_SECONDS": json.dumps(seconds)}
        return start_logged("-v0", "--log-level", "warning", *arguments, **environment)

    return start


def fire_some(count: int = 1) -> None:
    """Fire so many new timeouts with one attempt each."""
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(count)], "linger", seconds=0)
    wait_until(are_settled, "all are settled")
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}


def are_settled() -> bool:
    return not Timeout.objects.unsettled().exists()


def each_fired_once() -> int:
    """Check that all have fired with one attempt and one effect each; return how many."""
    fired = Timeout.objects.filter(state=Timeout.State.FIRED, attempts=1).values_list("pk", flat=True)
    assert len(fired) == Timeout.objects.count(), "no attempt was counted for what the database did"
    assert Counter(Effect.objects.values_list("timeout_id", flat=True)) == Counter(fired)
    return len(fired)
