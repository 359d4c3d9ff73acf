"""The peculiarities of each supported database: one class a vendor, each peculiarity named and explained once.

Other modules use these classes or Django's `connection.features`, and never ask for a connection's vendor.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Value
from django.db.models.functions import Concat
from django.utils import timezone

MAX_CUT_SECONDS = 1.0
"""How long to wait until a statement whose connection was shut down has ended."""


class Session(NamedTuple):
    """An open connection to a server: the server's number of it, if needed, and its socket.

    While a thread runs a statement, mysqlclient answers no question of another one about the connection.
    """

    number: int | None
    socket: int
    inode: int

    @classmethod
    def of(cls, driver: Any, number: int | None = None) -> Session | None:
        """Return the session of the open `driver` connection; None if it has no socket that is known."""
        try:
            socket = driver.fileno()
            return cls(number, socket, os.fstat(socket).st_ino)
        except Exception:  # noqa: BLE001 - a driver without sockets
            return None

    def shut_down(self) -> None:
        """Shut the socket down, so that both ends notice, unless it was closed."""
        with suppress(OSError):
            copy = socket.socket(fileno=os.dup(self.socket))
            try:
                if os.fstat(copy.fileno()).st_ino == self.inode:  # else the number is another socket's now
                    copy.shutdown(socket.SHUT_RDWR)
            finally:
                copy.close()


class Dialect:
    """Behave as the SQL standard and Django say, which is also how an unsupported database is treated."""

    oldest: ClassVar[dict[str, tuple[int, ...]]] = {}
    """The first version that the ledger can use, by the display name of the server; unnamed: those of Django."""

    server_time: str = ""
    """SQL of the server's clock in UTC; empty if the database runs in this process and shares its clock."""

    locks_what_it_reads: bool = False
    """Whether a locking read or an UPDATE locks all rows that it reads, and not only those that it finds.

    The optimizer of such a database may read a small table from end to end, or by an index that does not identify the
    row, and then waits for rows that the statement does not name.
    """

    on_conflict_keep: str = "ON CONFLICT DO NOTHING"
    """The end of an INSERT that writes nothing if the slot is taken. Any other error of the INSERT is raised."""

    locks_and_writes_at_once: bool = False
    """Whether one statement can lock an object in a WITH clause, then insert or update a row, and return the row."""

    updates_from_rows: bool = False
    """Whether `UPDATE ... FROM rows_of_json(...)` is the fastest way to write many rows, and locks no others."""

    compares_rows_by_index: bool = True
    """Whether `(a, b) > (x, y)` searches an index.

    If not, the index is read from its beginning. Then `a > x OR (a = x AND b > y)` searches it, and `state = x` must be
    written as the range `state >= x AND state <= x`: an equality reads all rows of that state again for each page.
    """

    connection_limits: str = ""
    """SQL for how many connections this account may open: rows of (limit or NULL, name of the setting)."""

    hex_type: str | None = None
    """The type of a column for 32 hexadecimal digits, if strings are not the smallest; reads return `uuid.UUID`."""

    key_arrays: ClassVar[dict[str, str]] = {}
    """The type of the elements of an array, by type of key. Of no type, or of all: then one parameter has all keys."""

    needs_statistics: bool = False
    """Whether a join with a subquery may take quadratic time until the tables have been analyzed."""

    datetime_text: str = ""
    """Regular expression of what Django stores, where datetimes are strings: raw SQL may write others."""

    text_as_key: ClassVar[dict[str, str]] = {}
    """SQL for the key of the string `{0}`, or NULL, by type of key, where a bare cast may raise an error."""

    last_error: str = "SUBSTRING_INDEX(SUBSTRING_INDEX(JSON_EXTRACT(%(expressions)s, '$[*].error'), '\"', -2), '\"', 1)"
    """SQL for the type of the last error in the JSON of a history, a word; NULL: there is none."""

    limits_of_silence: ClassVar[dict[str, int]] = {}
    """Options of the driver, with proper values, that end the wait for a server that has stopped answering."""

    limit_waits: tuple[str, str] = ("", "")
    """SQL for the beginning of a transaction that ends each wait for a table after two seconds; SQL that undoes it."""

    wait_briefly: str = ""
    """SQL that ends the waits for locks in the rest of a transaction, where `raising_instead_of_waiting` does not."""

    sets: str = "SET|RESET|USE"
    """The beginnings, as a regular expression, of statements that change the session beyond their transaction."""

    sets_by_call: re.Pattern[str] | None = None
    """A call anywhere in a statement that does so, as the group `sets`. It begins with a literal, for speed."""

    commits: str = "(?!)"
    """The beginnings of statements that commit, beside COMMIT and those that begin another transaction."""

    session_attributes: tuple[str, ...] = ()
    """Attributes of a connection of the driver that are settings of the session."""

    def now(self, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        """Return the server's clock as SQL that can be compared with `DateTimeField`s, and its parameters."""
        return self.server_time, ()

    def datetime_literal(self, sql: str) -> str:
        """Return the SQL of a datetime parameter so that a selected one comes back as a datetime."""
        return sql

    def midnight(self, date: str) -> str:
        """Return the SQL of the midnight of a date, in UTC if `USE_TZ`, as this database has `DateTimeField`s."""
        raise NotImplementedError

    def microseconds(self, duration: str) -> str:
        """Return the SQL of the number of microseconds of a `DurationField`."""
        return duration

    def prepares(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether PREPARE and EXECUTE, with parameters that the client binds, save time."""
        return False

    def repeats_reads(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether the settings ask for REPEATABLE READ or stricter, under which reads see a snapshot."""
        return False

    def plain_reads_may_be_stale(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether a plain read now returns the rows of a snapshot, and a locking read the latest ones.

        Other databases raise a serialization failure when a lock meets a newer row.
        """
        return False

    def variant(self, connection: BaseDatabaseWrapper) -> Any:
        """Return what the SQL of a query depends on beside the settings; see `ledger.statements`."""
        return None

    def begin_write(self, connection: BaseDatabaseWrapper, table: str) -> None:
        """Make the current transaction a writing one, where that cannot wait until the first write."""

    def begins_as_reader(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether the settings let transactions begin as readers, for which `begin_write` may be too late."""
        return False

    def raising_instead_of_waiting(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
        """Let statements of the block raise instead of waiting for locks that SKIP LOCKED cannot see."""
        return nullcontext()

    def file_of(self, connection: BaseDatabaseWrapper) -> object:
        """Return what identifies the file that is now in the place of the database; None: there is none."""
        return None

    def session_of(self, driver: Any) -> Session | None:
        """Return what `cut` and `give_up` need to know of the open `driver` connection; None without a server."""
        return Session.of(driver)

    def transaction_status(self, driver: Any) -> str | None:
        """Return "idle", "open", "failed" or "closed"; None: the `driver` connection does not know. Asks no server."""
        return None

    def reported(self, driver: Any) -> tuple[object, ...]:
        """Return settings of the session that the server has reported to the `driver` connection by itself."""
        return ()

    def give_up(self, driver: Any, session: Session | None) -> None:
        """Make the statement that another thread runs on the `driver` connection fail, whatever the server does.

        May take a second: a server notices the closed socket then, also while the statement waits for a lock. Does
        nothing for a database that runs in this process, where no statement waits for a server.
        """
        if session is not None:
            session.shut_down()

    def cut(self, connection: BaseDatabaseWrapper, session: Session | None, other: BaseDatabaseWrapper) -> None:
        """End the transaction of `connection`, which another thread is using, by means of `other` if need be.

        `session`: of `session_of`. Returns before the locks are released. May be repeated. Raises the driver's errors.
        """
        connection.connection.close()

    def in_states(self, rows: Any, states: Sequence[str]) -> Any:
        """Return those of `rows`, found by their ids, that are in one of `states`; for the condition of an UPDATE."""
        return rows.filter(state__in=states)

    def in_collation_of(self, sql: str, connection: BaseDatabaseWrapper, table: str, column: str) -> str:
        """Return `sql`, a string, so that it can be compared with a column."""
        return sql

    def rows_of_json(self, columns: Mapping[str, str], name: str) -> str:
        """Return SQL for a JSON parameter, a list of objects, as the rows `name` of `columns` with their types."""
        listed = ", ".join(f"{column} {kind} PATH '$.{column}'" for column, kind in columns.items())
        return f"JSON_TABLE(%s, '$[*]' COLUMNS ({listed})) AS {name}"

    def on_conflict(self, unique: Sequence[str], columns: Sequence[str]) -> str:
        """Return the end of an INSERT that updates `columns` where the `unique` ones exist already."""
        return f"ON CONFLICT ({', '.join(unique)}) DO UPDATE SET {', '.join(f'{x} = EXCLUDED.{x}' for x in columns)}"


class PostgreSQL(Dialect):
    """PostgreSQL 14 and later, with psycopg."""

    server_time = "STATEMENT_TIMESTAMP()"  # an index can be searched by it, unlike by the volatile CLOCK_TIMESTAMP()
    locks_and_writes_at_once = True
    needs_statistics = True
    hex_type = "uuid"
    updates_from_rows = True
    last_error = "(jsonb_path_query_array(%(expressions)s, '$[*].error') ->> -1)"
    # PostgreSQL would compile the statements that count the rows of many policies, for longer than it runs them.
    limit_waits = ("SELECT set_config('lock_timeout', '2s', true), set_config('jit', 'off', true)", "")
    wait_briefly = "SET LOCAL lock_timeout = '100ms'"
    limits_of_silence: ClassVar[dict[str, int]] = {
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 20_000,
    }
    key_arrays: ClassVar[dict[str, str]] = {"uuid": "uuid", "text": "text", "integer": "bigint"}
    connection_limits = (
        "SELECT rolconnlimit, 'CONNECTION LIMIT of role ' || rolname FROM pg_roles WHERE rolname = session_user"
        " AND NOT rolsuper UNION ALL SELECT datconnlimit, 'CONNECTION LIMIT of database ' || datname"
        " FROM pg_database JOIN pg_roles ON rolname = session_user AND NOT rolsuper WHERE datname = current_database()"
        " UNION ALL SELECT current_setting('max_connections')::int, 'max_connections of the server'"
    )
    text_as_key: ClassVar[dict[str, str]] = {
        "integer": (
            "(CASE WHEN {0} ~ '^-?[0-9]{1,19}$' THEN CASE WHEN {0}::numeric"
            f" BETWEEN {-(2**63) + 1} AND {2**63 - 1} THEN {{0}}::bigint END END)"
        ),
        "uuid": "(CASE WHEN {0} ~ '^[0-9a-f-]{36}$' THEN {0}::uuid END)",
    }

    sets = r"SET(?!\s+(?:LOCAL|TRANSACTION|CONSTRAINTS)\b)|RESET|DISCARD"
    session_attributes = ("autocommit", "isolation_level", "read_only", "row_factory", "cursor_factory")
    sets_by_call = re.compile(r"(?P<sets>set_config)\b(?<!\wset_config)(?!\s*\([^;]*,\s*(?i:true)\s*\))")
    _STATUSES = ("idle", "open", "open", "failed", "closed")  # of libpq: IDLE, ACTIVE, INTRANS, INERROR, UNKNOWN

    def midnight(self, date: str) -> str:
        """Without `USE_TZ` in the zone of the session, to which Django sets `TIME_ZONE`."""
        zone = " AT TIME ZONE 'UTC'" if settings.USE_TZ else ""
        return f"(CAST({date} AS TIMESTAMP){zone})"

    def microseconds(self, duration: str) -> str:
        return f"CAST(EXTRACT(EPOCH FROM {duration}) * 1000000 AS bigint)"

    def transaction_status(self, driver: Any) -> str:
        libpq = getattr(driver, "pgconn", None)  # of psycopg 3
        return self._STATUSES[driver.get_transaction_status() if libpq is None else libpq.transaction_status]

    def reported(self, driver: Any) -> tuple[object, ...]:
        if (libpq := getattr(driver, "pgconn", None)) is None:
            return driver.get_parameter_status("TimeZone"), driver.get_parameter_status("DateStyle")
        return libpq.parameter_status(b"TimeZone"), libpq.parameter_status(b"DateStyle")

    def prepares(self, connection: BaseDatabaseWrapper) -> bool:
        return not connection.settings_dict["OPTIONS"].get("server_side_binding")

    def repeats_reads(self, connection: BaseDatabaseWrapper) -> bool:
        level = connection.settings_dict["OPTIONS"].get("isolation_level")
        if level is None:
            return False
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        return level not in {IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED}

    def give_up(self, driver: Any, session: Session | None) -> None:
        """Shut the socket down, and have the server cancel the statement: it may wait for a lock until it gets one."""
        cancel = self._canceling(driver)
        super().give_up(driver, session)
        cancel()

    def _canceling(self, driver: Any) -> Callable[[], object]:
        if hasattr(driver, "cancel_safe"):  # psycopg 3.2
            return functools.partial(driver.cancel_safe, timeout=MAX_CUT_SECONDS)
        return cast("Callable[[], object]", driver.cancel)

    def cut(self, connection: BaseDatabaseWrapper, session: Session | None, other: BaseDatabaseWrapper) -> None:
        """Cancel the running statement, shut the socket down, and give up the place in the pool.

        The server notices a closed socket only between two statements. PgBouncer forwards the cancellation only
        before the shutdown, and a statement that begins between the two needs another one. This needs neither rights
        nor the number of the backend, for which PgBouncer returns another one.
        """
        driver: Any = connection.connection
        if driver.closed:
            return
        with suppress(Exception):
            self._canceling(driver)()
        with suppress(Exception):
            self.give_up(driver, session)
        # Closed, because the pool would pass an idle one on; but not while the other thread is in libpq, which might
        # then close the socket of another connection. If its statement does not end, it returns the connection later.
        if getattr(connection, "pool", None) is not None and driver.lock.acquire(timeout=MAX_CUT_SECONDS):
            connection._close = lambda: None  # type: ignore[attr-defined]
            with suppress(Exception):
                driver.close()
            driver.lock.release()
            with suppress(Exception):
                driver._pool.putconn(driver)

    def rows_of_json(self, columns: Mapping[str, str], name: str) -> str:
        listed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
        return f"json_to_recordset(%s) AS {name} ({listed})"


class MySQL(Dialect):
    """MySQL and MariaDB with InnoDB."""

    oldest: ClassVar[dict[str, tuple[int, ...]]] = {"MySQL": (8, 0, 17), "MariaDB": (10, 6)}
    server_time = "UTC_TIMESTAMP(6)"
    # Not INSERT IGNORE, which would also truncate values silently.
    on_conflict_keep = "ON DUPLICATE KEY UPDATE slot = VALUES(slot)"
    limit_waits = (
        "SET @delayq_wait = @@SESSION.lock_wait_timeout, SESSION lock_wait_timeout = 2",
        "SET SESSION lock_wait_timeout = @delayq_wait",
    )
    locks_what_it_reads = True
    compares_rows_by_index = False
    limits_of_silence: ClassVar[dict[str, int]] = {"connect_timeout": 5, "read_timeout": 60, "write_timeout": 60}
    connection_limits = "SELECT @@max_user_connections, CONCAT('MAX_USER_CONNECTIONS of ', CURRENT_USER())"
    # SET LOCAL is another name of SET SESSION here. A variable of the user affects nothing of the library.
    # https://dev.mysql.com/doc/refman/8.4/en/implicit-commit.html lists what commits.
    commits = (
        r"(?:CREATE|DROP)(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY)|ALTER|ANALYZE|CACHE|CHANGE|CHECK|FLUSH|GRANT|INSTALL"
        r"|LOAD\s+INDEX|LOCK|OPTIMIZE|RENAME|REPAIR|RESET|REVOKE|SET\s+PASSWORD|SET(?!\s+STATEMENT)\b[^'\"]*\bAUTOCOMMIT"
        "|START|STOP|TRUNCATE|UNINSTALL|UNLOCK"
    )
    sets = r"SET(?!\s+(?:STATEMENT\b|TRANSACTION\b|@[^@]))|USE|LOCK"

    def now(self, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        """Convert UTC to the time zone of the columns.

        That is the one that DATABASES names, UTC if it names none, or Django's own without USE_TZ. Many servers lack
        the tables of named zones, so the zone is written as its present offset.
        """
        offset = datetime.now(connection.timezone or timezone.get_default_timezone()).utcoffset()
        if not offset:
            return self.server_time, ()
        return f"({self.server_time} + INTERVAL %s SECOND)", (int(offset.total_seconds()),)

    def datetime_literal(self, sql: str) -> str:
        """Cast the parameter: a bare one is selected as a string."""
        return f"CAST({sql} AS DATETIME(6))"

    def midnight(self, date: str) -> str:
        return f"CAST({date} AS DATETIME(6))"

    def repeats_reads(self, connection: BaseDatabaseWrapper) -> bool:
        level = connection.settings_dict["OPTIONS"].get("isolation_level", "read committed")
        return level is None or level.lower() not in {"read committed", "read uncommitted"}  # None: the server's own

    def plain_reads_may_be_stale(self, connection: BaseDatabaseWrapper) -> bool:
        return connection.in_atomic_block and self.repeats_reads(connection)

    def variant(self, connection: BaseDatabaseWrapper) -> Any:
        return self.plain_reads_may_be_stale(connection), self.now(connection)

    def raising_instead_of_waiting(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
        """On MariaDB, whose unique indexes lock gaps between rows, set the lock timeout of each statement to zero."""

        def at_once(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
            return execute(f"SET STATEMENT innodb_lock_wait_timeout = 0 FOR {sql}", *rest)

        is_mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
        return connection.execute_wrapper(at_once) if is_mariadb else nullcontext()

    def in_states(self, rows: Any, states: Sequence[str]) -> Any:
        """Hide the column from the index of states and times.

        The optimizer prefers that index to the primary key while few rows are in `states`. An UPDATE of one row then
        reads the next one in the index, too, and waits for the transaction that has locked it. Pending rows are found
        by `slot_taken=1`, which is in no such index.
        """
        return rows.alias(unindexed_state=Concat("state", Value(""))).filter(unindexed_state__in=states)

    def session_of(self, driver: Any) -> Session | None:
        return Session.of(driver, driver.thread_id())

    def transaction_status(self, driver: Any) -> str | None:
        """Return None while autocommit is on: the driver does not know whether BEGIN was executed."""
        return "closed" if not driver.open else None if driver.get_autocommit() else "open"

    def cut(self, connection: BaseDatabaseWrapper, session: Session | None, other: BaseDatabaseWrapper) -> None:
        """Shut the socket down, and have the server end it: an account may always end its own connections."""
        if session is not None:
            session.shut_down()  # ends it between two statements, even if `other` cannot be opened
            with other.cursor() as cursor:
                cursor.execute("KILL CONNECTION %s", [session.number])

    def in_collation_of(self, sql: str, connection: BaseDatabaseWrapper, table: str, column: str) -> str:
        """Convert the string to the collation of the column: the server refuses to compare two different ones."""
        collation = _collation(connection.alias, table, column)
        return f"(CONVERT({sql} USING {collation.partition('_')[0]}) COLLATE {collation})"

    def on_conflict(self, unique: Sequence[str], columns: Sequence[str]) -> str:
        return f"ON DUPLICATE KEY UPDATE {', '.join(f'{column} = VALUES({column})' for column in columns)}"


class SQLite(Dialect):
    """SQLite, of which a writing transaction holds the whole database."""

    locks_and_writes_at_once = True
    session_attributes = ("isolation_level", "row_factory", "text_factory")
    # Not one that only reads, such as PRAGMA table_info(x).
    sets = r"ATTACH|DETACH|PRAGMA\s+(?!\S*_(?:x?info|list|check)\b)[^=(]*\w(?=\s*[=(])"
    last_error = "(SELECT atom FROM json_tree(%(expressions)s) WHERE key = 'error' ORDER BY id DESC LIMIT 1)"
    datetime_text = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.(?!0{6})\d{6})?$"

    def midnight(self, date: str) -> str:
        return f"(DATE({date}) || ' 00:00:00')"

    def begin_write(self, connection: BaseDatabaseWrapper, table: str) -> None:
        """Write nothing. A transaction that reads first and writes later fails without waiting if another wrote.

        Not where the outermost `atomic()` has begun the transaction as a writing one.
        """
        if connection.commit_on_exit and not self.begins_as_reader(connection):
            return
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE {connection.ops.quote_name(table)} SET id = id WHERE id = -1")

    def transaction_status(self, driver: Any) -> str:
        return "open" if driver.in_transaction else "idle"

    def cut(self, connection: BaseDatabaseWrapper, session: Session | None, other: BaseDatabaseWrapper) -> None:
        """Interrupt the running statement and roll back. A statement that begins meanwhile cannot write.

        The connection is not closed: SQLite would free what the other thread may be using.
        """
        driver: Any = connection.connection
        driver.interrupt()
        if driver.in_transaction:  # if not, it holds no lock, and may be waiting for one
            driver.execute("PRAGMA query_only = 1")
            driver.rollback()

    def file_of(self, connection: BaseDatabaseWrapper) -> object:
        """Return its device and number. A connection to a file that was replaced keeps serving the former one."""
        try:
            found = Path(connection.settings_dict["NAME"]).stat()
        except (OSError, TypeError, ValueError):  # in memory, or just being replaced
            return None
        return found.st_dev, found.st_ino

    def rows_of_json(self, columns: Mapping[str, str], name: str) -> str:
        listed = ", ".join(f"json_extract(value, '$.{column}') AS {column}" for column in columns)
        return f"(SELECT {listed} FROM json_each(%s)) AS {name} WHERE true"  # without WHERE, ON would begin a join

    def begins_as_reader(self, connection: BaseDatabaseWrapper) -> bool:
        mode = str(connection.settings_dict.get("OPTIONS", {}).get("transaction_mode", ""))
        return mode.upper() not in {"IMMEDIATE", "EXCLUSIVE"}


UNSUPPORTED = Dialect()
_DIALECTS: dict[str, Dialect] = {"postgresql": PostgreSQL(), "mysql": MySQL(), "sqlite": SQLite()}


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of the database behind `connection`, without connecting."""
    return _DIALECTS.get(connection.vendor, UNSUPPORTED)


@functools.cache
def _collation(using: str, table: str, column: str) -> str:
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT collation_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = %s AND column_name = %s",
            [table, column],
        )
        return str(cursor.fetchone()[0])
