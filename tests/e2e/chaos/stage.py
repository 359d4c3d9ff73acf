"""The servers of a run, their proxies, its database, and the environment in which its processes meet them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from tests.e2e.chaos import audit
from tests.e2e.chaos.databases import DATABASES
from tools import processes
from tools.servers import RedisServer

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

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)


class Proxies:
    """The process of `proxy.py`."""

    def __init__(self, targets: dict[str, int], log: Path) -> None:
        command = [sys.executable, "-m", "tests.e2e.chaos.proxy", json.dumps(targets)]
        pipe = subprocess.PIPE
        with log.open("ab") as errors:
            self._process = processes.start(command, stdin=pipe, stdout=pipe, stderr=errors, cwd=ROOT)
        self.ports: dict[str, int] = self._hear()

    def order(self, name: str, fault: str, **what: Any) -> None:
        self._tell({"name": name, "fault": fault, **what})

    def calm(self) -> None:
        self._tell("calm")

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of faults by proxy and kind."""
        self._tell(None)
        counts: dict[str, dict[str, int]] = self._hear()
        return counts

    def close(self) -> None:
        processes.kill(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _tell(self, order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(order) if order is not None else "").encode() + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxies ended by themselves, with {self._process.wait()}")
        return json.loads(line)


class Stage:
    """The servers and processes of a run; only its folder remains afterwards."""

    def __init__(self, folder: Path, database: str = "postgresql") -> None:
        self.folder = folder
        folder.chmod(0o711)  # the database's account must reach its own directory in it
        self.database = DATABASES[database](folder / "database")
        self.redis = Redis(folder / "redis")
        self.broker = Redis(folder / "broker")
        """The server of Celery's messages."""
        self.proxies: Proxies
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
        targets = {f"{server}-{side}": port for server, port in servers.items() for side in SIDES}
        self.proxies = Proxies(targets, self.folder / "proxies.log")
        standing.callback(self.proxies.close)
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
        ports = self.proxies.ports
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
