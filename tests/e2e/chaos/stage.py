"""The servers of a run, their proxies, its database, and the environment in which its processes meet them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.e2e.chaos import audit
from tests.e2e.chaos.databases import DATABASES
from tests.engine.fault_proxy import FaultProxy
from tools.servers import RedisServer, Server

ROOT = Path(__file__).resolve().parents[3]
DURATIONS = {"LEASE": 2.0, "SWEEP_INTERVAL": 1.0, "SYNC_INTERVAL": 6.0}
"""The sync leaves deadlines alone that passed while it was away for ten intervals: a minute, even on a busy machine."""
SIDES = ("producers", "workers")


class Redis(RedisServer):
    """A server that keeps a log of its writes, or does not, from the next start on."""

    keeps = True

    def command(self) -> list[str | Path]:
        words = super().command()
        if self.keeps:
            words[words.index("--appendonly") + 1] = "yes"
        return words


def signal_all(server: Server, number: int) -> None:
    """Signal the process of a server, and those that it has started."""
    if server.process is not None:
        pid = server.process.pid
        os.kill(pid, number)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), number)


class Stage:
    """The servers and processes of a run; only its folder remains afterwards."""

    def __init__(self, folder: Path, database: str = "postgresql") -> None:
        self.folder = folder
        folder.chmod(0o711)  # the database's account must reach its own directory in it
        self.database = DATABASES[database](folder / "database")
        self.redis = Redis(folder / "redis")
        self.broker = Redis(folder / "broker")
        """The server of Celery's messages."""
        self.proxies: dict[str, FaultProxy] = {}
        """One for each server and side."""
        self._standing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as standing:
            self._set_up(standing)
            self._standing = standing.pop_all()
        return self

    def _set_up(self, standing: contextlib.ExitStack) -> None:
        if self.database.server is not None:
            standing.enter_context(self.database.server)
        for server in (self.redis, self.broker):
            standing.callback(server.kill)
            server.start()
        servers = {"redis": self.redis.port}
        if self.database.server is not None:
            servers["database"] = self.database.server.port
        for name, port in servers.items():
            for side in SIDES:
                self.proxies[f"{name}-{side}"] = standing.enter_context(FaultProxy(("127.0.0.1", port)))
        self.database.set_up()
        command = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"]
        subprocess.run(command, env=self.environment("workers"), cwd=ROOT, check=True)
        audit.install(self.database)

    def __exit__(self, *_: object) -> None:
        self._standing.close()

    def environment(self, side: str, user: str = "", **variables: str) -> dict[str, str]:
        """For a process on one side of the proxies; `variables` as `tests/settings.py` knows them.

        `user`: of its sessions in the database, if not the usual one.
        """
        ports = {name: proxy.port for name, proxy in self.proxies.items()}
        named = {
            "DB": self.database.name,
            "PREFIX": "chaos",
            "INSTALLATION": "chaos",
            **self.database.address(ports.get(f"database-{side}", 0), user),
            "BROKER": self.broker.url,
            "REDIS_URL": f"redis://127.0.0.1:{ports[f'redis-{side}']}/0",
            "SECONDS": json.dumps(DURATIONS),
            **variables,
        }
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.e2e.chaos.settings",
            "PYTHONPATH": str(ROOT),
            **{f"DELAYQ_TEST_{name}": value for name, value in named.items()},
        }
