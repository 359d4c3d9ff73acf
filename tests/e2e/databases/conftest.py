"""A database server of the test's own, which it may restart, and a worker that reaches it through a proxy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection

from django_delayq import redis_clients
from django_delayq.redis_clients import forget_engine
from tests.conftest import ROOT
from tests.engine.fault_proxy import FaultProxy
from tools import processes
from tools.servers import MariadbServer, PostgresServer, Server

SERVERS: dict[str, tuple[type[Server], str]] = {
    "postgresql": (PostgresServer, "DELAYQ_TEST_POSTGRESQL_URL"),
    "mysql": (MariadbServer, "DELAYQ_TEST_MARIADB_URL"),
}


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
            "DELAYQ_TEST_SECONDS": json.dumps({"LEASE": 2, "SWEEP_INTERVAL": 1}),
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


@pytest.fixture
def start_worker(own_database: OwnDatabase, tmp_path: Path) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Start a worker with a log file; return its process id and the file. It must stop gracefully."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "worker.log"

    def start(verbosity: int = 0) -> tuple[int, Path]:
        with log.open("wb") as output:
            arguments = f"-m django delayq_worker --processes 1 -v{verbosity} --log-level warning"
            command = [sys.executable, *arguments.split()]
            worker = processes.start(command, env=own_database.environment, cwd=ROOT, stdout=output, stderr=output)
        started.append(worker)
        return worker.pid, log

    yield start
    for worker in started:
        worker.send_signal(signal.SIGTERM)
        try:
            assert worker.wait(60) == 0, log.read_text()
        finally:
            processes.kill(worker)
