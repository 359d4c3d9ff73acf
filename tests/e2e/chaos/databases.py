"""The databases of a run behind one face: their server, what breaks it, and a session that bypasses the proxies."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tools import processes
from tools.servers import MariadbServer, PostgresServer, Server

NAME = "chaos"
INTRUDER, CELERY = USERS = ("intruder", "celery")
"""The names under which a worker of another installation, and processes of Celery, write."""


class Database:
    """The database of a run. `name` is that of `DELAYQ_TEST_DB`, `label` that of its faults."""

    name: ClassVar[str]
    label: ClassVar[str]
    text: ClassVar[str]
    """The type of a string, for a cast."""
    system: ClassVar[str] = ""
    """The database that a new server has."""
    users: ClassVar[Sequence[str]] = ()
    """Statements that create a user."""
    server: Server | None = None

    def set_up(self) -> None:
        """Create the empty database, on a server that runs."""
        for statement in [f"CREATE DATABASE {NAME}", *(each.format(user) for user in USERS for each in self.users)]:
            self._execute(self._connect(self.system), statement)

    def address(self, port: int, user: str) -> dict[str, str]:
        """Return the variables of `tests/settings.py` that lead to it through `port`."""
        raise NotImplementedError

    def _connect(self, database: str) -> Any:
        """Return a DB-API connection in autocommit mode that bypasses the proxies. Raises an error of its driver."""
        raise NotImplementedError

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a statement in a session of its own and return its rows. Raises an error of the driver."""
        return self._execute(self._connect(NAME), sql, values)

    @staticmethod
    def _execute(connection: Any, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            cursor = connection.cursor()
            cursor.execute(sql, values) if values else cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

    def crash(self) -> None:
        """End the server; its next start recovers."""
        assert self.server is not None
        self.server.kill()

    def end_sessions(self, share: float) -> None:
        """End about so many of all sessions. Raises an error of the driver."""

    def hold_write_lock(self) -> Callable[[], None]:
        """Lock the database for all writers; return the function that unlocks it. Raises an error of the driver."""
        raise NotImplementedError


class Postgres(Database):
    name, label, text, system = "postgresql", "postgres", "varchar", "postgres"
    users = ("CREATE ROLE {} SUPERUSER LOGIN",)

    class Server(PostgresServer):
        """A server that keeps what it has committed when it crashes (the machine does not)."""

        def command(self) -> list[str | Path]:
            return [*super().command(), "-c", "synchronous_commit=on"]

    def __init__(self, folder: Path) -> None:
        self.server: Server = self.Server(folder)

    def address(self, port: int, user: str) -> dict[str, str]:
        return {"DB_NAME": NAME, "POSTGRESQL_URL": f"postgresql://{user or 'delayq'}@127.0.0.1:{port}/{NAME}"}

    def _connect(self, database: str) -> Any:
        import psycopg

        port = self.server.port
        return psycopg.connect(host="127.0.0.1", port=port, user="delayq", dbname=database, autocommit=True)

    def crash(self) -> None:
        """Shut down immediately: all sessions are cut."""
        if self.server.process is not None:
            processes.stop(self.server.process, first=signal.SIGQUIT)
            self.server.process = None

    def end_sessions(self, share: float) -> None:
        self.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < %s",
            [share],
        )


class Mariadb(Database):
    name, label, text, system = "mariadb", "mariadb", "char", "mysql"
    users = ("CREATE USER '{}'@'127.0.0.1'", "GRANT ALL ON *.* TO '{}'@'127.0.0.1'")

    class Server(MariadbServer):
        """A server that keeps what it has committed when it is killed, and numbers what it has committed.

        Its number changes with each start: together with that of a session, it names the session.
        """

        starts = 0

        def command(self) -> list[str | Path]:
            self.starts += 1
            words = [word for word in super().command() if word != "--skip-log-bin"]
            words = [word for word in words if not str(word).startswith("--innodb-flush-log")]
            log = ["--log-bin=chaos", "--binlog-format=ROW", f"--server-id={self.starts}"]
            return [*words, "--innodb-flush-log-at-trx-commit=2", *log]

    def __init__(self, folder: Path) -> None:
        self.server: Server = self.Server(folder)

    def address(self, port: int, user: str) -> dict[str, str]:
        return {"DB_NAME": NAME, "MARIADB_URL": f"mysql://{user or 'root'}@127.0.0.1:{port}/{NAME}"}

    def _connect(self, database: str) -> Any:
        import MySQLdb

        where = {"host": "127.0.0.1", "port": self.server.port, "user": "root", "database": database}
        return MySQLdb.connect(**where, charset="utf8mb4", autocommit=True)

    def end_sessions(self, share: float) -> None:
        own = "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> CONNECTION_ID() AND RAND() < %s"
        for (id,) in self.rows(own, [NAME, share]):
            self.rows(f"KILL CONNECTION {id}")


class Sqlite(Database):
    """A file: there is no server that may fail, and all processes are on this machine."""

    name, label, text = "sqlite", "sqlite", "text"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder / f"{NAME}.sqlite3"

    def set_up(self) -> None:
        """The first connection creates the file."""

    def address(self, port: int, user: str) -> dict[str, str]:
        return {"DB_NAME": str(self._file), "SESSION_USER": user}

    def _connect(self, database: str) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=20, isolation_level=None)

    def hold_write_lock(self) -> Callable[[], None]:
        connection = self._connect(NAME)
        connection.execute("BEGIN IMMEDIATE")
        return connection.close


DATABASES: dict[str, type[Any]] = {each.name: each for each in (Postgres, Mariadb, Sqlite)}
