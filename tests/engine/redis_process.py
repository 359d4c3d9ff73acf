"""Redis servers of the tests' own: each in a directory of its own, suspended and reconfigured at will.

    with RedisProcess() as server, server.client() as client:
        ...

Nothing here knows the engine; other tests may use it as it is.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tools.servers import RedisServer


class RedisProcess(RedisServer):
    """A server with a unix socket, and with further options of its command line; it takes its directory with it."""

    def __init__(self, binary: Path | None = None, port: int = 0, extra: Sequence[str] = ()) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="delayq-redis-")), binary)
        self.port = port
        self.extra = tuple(extra)
        self.socket = str(self.home / "s")

    def command(self) -> list[str | Path]:
        return [*super().command(), "--unixsocket", self.socket, *self.extra]

    def pause(self) -> None:
        """Suspend the server: it keeps its connections and answers nothing."""
        assert self.process is not None, "the server was not started"
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None, "the server was not started"
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Remove the server, even a suspended one, and its directory."""
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def client(self, *, tcp: bool = False, **options: Any) -> redis.Redis:
        """Return a client without automatic retries, so that tests see every error."""
        address = {"host": "127.0.0.1", "port": self.port} if tcp else {"unix_socket_path": self.socket}
        return redis.Redis(**{"retry": Retry(NoBackoff(), 0), "socket_timeout": 10, **address, **options})
