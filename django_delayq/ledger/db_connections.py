"""The database connections of a worker: how many it needs, when a thread closes or returns one, and why one fails.

A worker without a pool keeps the connections of its threads open, because opening one costs more than most firings.
With psycopg's pool a thread returns its connection after each run, so that the pool can lend it to another thread.

Some errors are transient, and not errors of the handler: a deadlock, a serialization failure, a lock timeout, a lost
connection, a server that restarts or is full. The firing is rolled back and retried soon, and no attempt is counted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, cast

from django.conf import settings
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.models import Model
from django.db.utils import Error, InterfaceError, InternalError, OperationalError

from django_delayq.backoff import LogInterval
from django_delayq.conf import ConfigError
from django_delayq.exceptions import DelayqError, NotMigrated
from django_delayq.ledger.left_open import close_left_open
from django_delayq.sql.dialects import dialect_of
from django_delayq.times.clock import plural

logger = logging.getLogger("django_delayq.worker")

IDLE_SECONDS: Final = 5.0
"""A connection that was idle for longer is tested before it is used: servers, proxies and firewalls cut it. The test is
done ahead of the deadline, so that it delays nothing."""
TEST_SECONDS: Final = 2.0
"""A connection that has not answered the test for so long is broken: what forgets connections often answers nothing."""
POOL_SIZE: Final = 4
"""The default of psycopg's pool."""
# SQLSTATE: serialization failure, deadlock, lock not available; insufficient resources, system error.
_TRANSIENT_STATES: Final = ("40001", "40P01", "55P03", "53", "58")
# MySQL: lock wait timeout, deadlock, either of the two at the counter of keys, record or table changed since, NOWAIT;
# too many connections, of the server, of the account. SQLite: BUSY, LOCKED, IOERR, FULL, CANTOPEN, PROTOCOL.
_TRANSIENT_CODES: Final = frozenset({1205, 1213, 1467, 1020, 1412, 3572, 1040, 1203, 1226, 5, 6, 10, 13, 14, 15})
# PostgreSQL; the table, or the disk, of MySQL; FULL of SQLite.
DISK_FULL: Final = frozenset({"53100", 1114, 1021, 13})
_DEADLOCK: Final = frozenset({"40P01", 1213})
_LOCKED: Final = frozenset({"55P03", 1205})
# Undefined table, undefined column: SQLSTATE, and numbers of MySQL. Insufficient privilege: only SQLSTATE, because the
# drivers of MySQL raise OperationalError then, as for a lost connection.
_MISSING: Final = frozenset({"42P01", "42703", 1146, 1054, "42501"})
# Read-only transaction (PostgreSQL); --read-only, read-only transaction, read-only mode, InnoDB read-only (MySQL and
# MariaDB); READONLY (SQLite).
_READ_ONLY: Final = frozenset({"25006", 1290, 1792, 1836, 1874, 8})

# PostgreSQL has ended the session: idle_in_transaction_session_timeout, transaction_timeout.
_ENDED_SESSIONS: Final = ("25P03", "25P04")


_replaced: dict[str, object] = {}
"""Which file was found in place of the open one, by alias: each thread finds it, and one logs it."""


_explained = LogInterval(math.inf)
"""Tables for which a deadlock was explained, once in each process."""


class LedgerLocked(DelayqError, OperationalError):
    """A statement has waited too long for a lock on a table."""


class Limit(NamedTuple):
    """How many connections a worker may open, and the setting that limits them."""

    size: int
    setting: str
    is_pool: bool = False

    @property
    def own(self) -> int:
        """Return how many connections the worker needs beside those of its handlers.

        They are for the main loop; for leases, heartbeat and sweep; for sync and pruning. With a pool the first two
        share one, because they need it only briefly.
        """
        return 2 if self.is_pool else 3

    def shortage(self, concurrency: int) -> str | None:
        """Describe the limit if a worker with `concurrency` handler threads needs more; else return None."""
        needed = concurrency + self.own
        if self.size >= needed:
            return None
        return (
            f"{self.setting} allows {plural(self.size, 'connection')}, but a worker with "
            f"{plural(concurrency, 'handler thread')} needs {needed}."
        )

    def threads(self, concurrency: int) -> int:
        """Return how many handler threads fit, at most `concurrency`. Raises ConfigError if not even one fits."""
        least = 2 if self.is_pool else 1 + self.own  # threads that share the last connection of a pool take turns
        if self.size < least:
            raise ConfigError(
                f"{self.setting} allows {plural(self.size, 'connection')}. A worker needs at least {least}, "
                f"and {concurrency + self.own} for {plural(concurrency, 'handler thread')}. Raise the limit."
            )
        return max(1, min(concurrency, self.size - self.own))


def pool_limit(using: str) -> Limit | None:
    """Return the size of the connection pool of database `using`; None without a pool. Reads only the settings."""
    pool = connections[using].settings_dict.get("OPTIONS", {}).get("pool")
    if not pool:
        return None
    options: dict[str, Any] = pool if isinstance(pool, dict) else {}
    size = options.get("max_size") or options.get("min_size", POOL_SIZE)
    return Limit(size, f"DATABASES[{using!r}]['OPTIONS']['pool']: max_size", is_pool=True)


def server_limit(using: str) -> Limit | None:
    """Ask the server how many connections this role or account may open; None: as many as the server has.

    Raises the database's errors.
    """
    connection = connections[using]
    if not (statement := dialect_of(connection).connection_limits):
        return None
    with connection.cursor() as cursor:
        cursor.execute(statement)
        limits = [Limit(size, setting) for size, setting in cursor.fetchall() if size is not None and size > 0]
    return min(limits, default=None)


def open_connection(using: str) -> bool:
    """Open this thread's connection to the database, unless it comes from a pool; return False if that failed."""
    try:
        if pool_limit(using) is None:
            connections[using].ensure_connection()
    except Exception as error:  # noqa: BLE001 - the next query raises it again where it can be handled
        logger.debug("no connection to database %r yet: %s", using, error)
        return False
    return True


def check_connections(idle_seconds: float = 0.0, error: BaseException | None = None) -> bool:
    """Close this thread's connections that are broken or left open, and return pooled ones to their pool.

    Return whether one was broken.

    A worker has no requests, so a connection stays open as long as it works, whatever CONN_MAX_AGE is. Otherwise a new
    one would be opened at a deadline. A connection inside a transaction is not closed.

    Args:
        idle_seconds: how long they were not used. After `IDLE_SECONDS` they are tested.
        error: the exception of the last run. If it needs new connections, all are closed: a test would succeed.
    """
    is_useless = error is not None and needs_new_connection(error)
    found_broken = close_left_open() > 0
    for connection in connections.all(initialized_only=True):
        if settings.DEBUG and not connection.force_debug_cursor:  # not while a test counts queries
            connection.queries_log.clear()  # Django keeps up to 9,000 statements of each connection
        if connection.connection is None or connection.in_atomic_block:
            continue
        is_replaced = _is_replaced(connection)
        must_test = error is not None or connection.errors_occurred or idle_seconds > IDLE_SECONDS
        if is_useless or is_replaced or (must_test and not is_usable(connection)):
            discard(connection)
            found_broken = True
        elif getattr(connection, "pool", None) is not None:
            with contextlib.suppress(Exception):
                connection.close()
    return found_broken


def _is_replaced(connection: BaseDatabaseWrapper) -> bool:
    """Return whether another file has taken the place of the open one, and log that once."""
    file, opened = dialect_of(connection).file_of(connection), vars(connection).get("delayq_file")
    if file is None or opened is None or file == opened:
        return False
    if _replaced.get(connection.alias) != file:
        _replaced[connection.alias] = file
        words = "The file of database %r was replaced, and is opened again"
        logger.warning(words, connection.alias, extra={"event": "database_replaced", "database": connection.alias})
    return True


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close the connection, and all idle ones of its pool, which most likely are broken or read-only, too.

    Inside a transaction nothing is closed.
    """
    if connection.in_atomic_block:
        return
    with contextlib.suppress(Exception):
        if pool := cast("Any", getattr(connection, "pool", None)):
            (getattr(pool, "drain", None) or connection.connection.close)()  # psycopg_pool 3.3 can drain it
    with contextlib.suppress(Exception):
        connection.close()  # without a rollback, which may wait for a server that has stopped answering


def give_up(connection: BaseDatabaseWrapper) -> None:
    """Make the statement that another thread runs on `connection` fail, as if the server had closed it."""
    driver = connection.connection
    if driver is not None:
        with contextlib.suppress(Exception):  # it has just been closed
            dialect_of(connection).give_up(driver, vars(connection).get("delayq_session"))


@contextmanager
def limited_waits(using: str) -> Iterator[None]:
    """Raise LedgerLocked if a statement of the block waits for a lock on a table: an operator wants to know it now.

    A session setting would reach other clients of a pooler, so the block is a transaction. Inside one of the caller,
    whose later statements it would affect, do nothing.
    """
    connection = connections[using]
    begin, end = dialect_of(connection).limit_waits
    if not begin or connection.in_atomic_block:
        yield
        return
    try:
        with transaction.atomic(using):
            with connection.cursor() as cursor:
                cursor.execute(begin)
            yield
    except Error as error:
        if error_code(error) in _LOCKED:
            raise LedgerLocked(
                "A transaction has locked a table of the ledger: nothing fires until it ends. It may be a migration"
            ) from error
        raise
    finally:
        if end and connection.connection is not None:
            with contextlib.suppress(Error), connection.cursor() as cursor:
                cursor.execute(end)


def use_after_commit(act: Callable[[], object], using: str) -> None:
    """Run `act`, which uses the database, after the commit. Django logs its errors, and the caller does not see them.

    After an error of the database its connection is closed. MySQL may lose it between COMMIT and the switch back to
    autocommit, and Django's next `atomic()` on such a connection would commit nothing, or be its last one.
    """

    def run() -> None:
        try:
            act()
        except Error:
            discard(connections[using])
            raise

    transaction.on_commit(run, using=using, robust=True)


def share_with_thread(shared: Sequence[BaseDatabaseWrapper]) -> None:
    """Allow another thread to use the connections `shared` of this one, which must not use them meanwhile."""
    for connection in shared:
        connection.inc_thread_sharing()
        if connection.connection is not None:
            _note_session(connection=connection)


def unshare(shared: Sequence[BaseDatabaseWrapper]) -> None:
    """End what `share_with_thread` began, after the other thread has ended."""
    for connection in shared:
        connection.dec_thread_sharing()


def revoke(shared: Sequence[BaseDatabaseWrapper]) -> None:
    """Make the connections `shared` useless for the other thread. This thread opens new ones.

    They execute no further statement, commit nothing, and do not reconnect.
    """
    for connection in shared:
        for name in ("connect", "cursor", "validate_no_broken_transaction", "_commit"):
            setattr(connection, name, _refuse)
        # The other thread closes it, if it ends, but not while this one cuts it: the driver would free what is in use.
        lock = threading.Lock()
        vars(connection).update(delayq_lock=lock, _close=partial(_close_alone, lock, cast("Any", connection)._close))
        del connections[connection.alias]


def _close_alone(lock: threading.Lock, close: Callable[[], None]) -> None:
    with lock:
        close()


def _refuse(*_: Any, **__: Any) -> Any:
    raise InterfaceError("This thread may not use the database any more: its handler took longer than its time limit.")


def cut(shared: Sequence[BaseDatabaseWrapper]) -> None:
    """End the transactions of connections that were taken away. May be repeated; what fails is logged."""
    for connection in shared:
        state = vars(connection)
        try:
            with state["delayq_lock"]:
                if connection.connection is not None:
                    other = connections[connection.alias]
                    dialect_of(connection).cut(connection, state.get("delayq_session"), other)
        except Exception as error:  # noqa: BLE001 - it may be cut already; the row shows whether it is
            logger.debug("a connection to database %r could not be cut: %s", connection.alias, error)


def _note_session(*, connection: Any, **_: Any) -> None:
    connection.delayq_file = dialect_of(connection).file_of(connection)
    connection.delayq_session = dialect_of(connection).session_of(connection.connection)


connection_created.connect(_note_session, dispatch_uid="django_delayq.db_connections")


def is_usable(connection: BaseDatabaseWrapper) -> bool:
    """Test the connection with a query; return whether it is open and works."""
    timer = threading.Timer(TEST_SECONDS, give_up, [connection])
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread is left: test it without a limit
        timer.start()
    try:
        usable = connection.connection is not None and connection.is_usable()
    except Exception:  # noqa: BLE001 - whatever it is, the connection cannot be used
        return False
    finally:
        timer.cancel()
    if usable:
        connection.errors_occurred = False
    return usable


def needs_new_connection(error: BaseException) -> bool:
    """Return whether the same statement would be refused again and again on this connection, although it works.

    It leads to a primary that was demoted. Or it keeps a prepared statement, of which a migration has changed a column;
    only a rollback would forget it.
    """
    source = getattr(getattr(error.__cause__, "diag", None), "source_function", None)  # its messages are translated
    return error_code(error) in _READ_ONLY or source == "RevalidateCachedQuery"


@contextmanager
def explaining_deadlocks(model: type[Model]) -> Iterator[None]:
    """Log the first deadlock of the block, which locks objects of `model` because a row that they depend on changes."""
    try:
        yield
    except OperationalError as error:
        if error_code(error) in _DEADLOCK and _explained.is_over(model):
            words = "Deadlock at the lock of %s, before a row that policies read is written. See the page on races: %s"
            of_requests = logging.getLogger("django_delayq.arming")
            of_requests.warning(words, model._meta.label, error, extra={"event": "owner_deadlock"})
        raise


def error_code(error: BaseException) -> str | int | None:
    """Return the driver's code of a database error: SQLSTATE from psycopg, a number from MySQL's drivers and SQLite.

    SQLite's numbers are below 256, and those of MySQL above 1,000.
    """
    if not isinstance(error, Error):
        return None
    cause = error.__cause__ or error
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if isinstance(state, str):
        return state
    if isinstance(number := getattr(cause, "sqlite_errorcode", None), int):
        return number & 0xFF  # the rest of an extended code is a detail
    number = cause.args[0] if cause.args else None
    return number if isinstance(number, int) else None


def transient_reason(
    error: BaseException, using: str, errors: Sequence[BaseException] = (), driver_connection: object = None
) -> str | None:
    """Describe the transient database error that caused `error`; return None if the handler caused it.

    Call it after the rollback. A broken connection is closed, so that the next use opens another one.

    Args:
        error: the exception.
        using: the database.
        errors: those of the handler's statements: it may have caught the database error and raised another one.
        driver_connection: `connections[using].connection` from before the handler ran. A handler may use other
            databases, so a lost connection counts only if this one is lost, or replaced: leaving a transaction may have
            opened another one. None: no handler has run.
    """
    # The code of this process is newer than the tables, or older: a migration was applied too late, or too early. Or it
    # created a table without the permissions for the user of the worker.
    if driver_connection is None and is_missing(error):
        return f"the database lacks a table, a column or a permission ({_summary(error)})"
    causes = [error, *errors]
    contention = next((cause for cause in causes if _is_contention(cause)), None)
    is_lost = any(map(_is_connection_error, causes)) and (
        driver_connection is None
        or driver_connection is not connections[using].connection
        or not is_usable(connections[using])
    )
    if contention is not None and needs_new_connection(contention):
        discard(connections[using])
    if is_lost and not is_usable(connections[using]):
        discard(connections[using])
        contention = None
    if is_lost and contention is None:
        return f"the connection to the database failed ({_summary(error)})"
    return None if contention is None else _summary(contention)


def _is_connection_error(error: BaseException) -> bool:
    """Return whether a lost connection may have caused the error.

    psycopg raises InternalError if a server behind PgBouncer ends: a statement gets two replies. The server's own
    internal errors have a code. So has its end of a transaction that was idle, or took, too long.
    """
    if isinstance(error, InternalError):
        return error_code(error) in {None, *_ENDED_SESSIONS}
    return isinstance(error, OperationalError | InterfaceError)


def is_missing(error: BaseException) -> bool:
    """Return whether a statement named a table or column that the database does not have, or not for this user."""
    is_sqlite = isinstance(error, Error) and str(error).startswith(("no such table", "no such column"))
    return is_sqlite or error_code(error) in _MISSING


def _is_contention(error: BaseException) -> bool:
    code = error_code(error)
    has_state = isinstance(code, str) and code.startswith(_TRANSIENT_STATES)
    return has_state or code in _TRANSIENT_CODES or needs_new_connection(error)


def _summary(error: BaseException) -> str:
    first_line = str(error).strip().partition("\n")[0]  # the others, such as the processes of a deadlock, always differ
    return f"{type(error).__name__}: {' '.join(first_line.split())[:200]}"


def unapplied_migrations(using: str) -> list[str]:
    """Return the apps with migrations that are not applied to the database `using`. Raises the database's errors."""
    from django.db.migrations.loader import MigrationLoader  # which web processes do not need

    loader = MigrationLoader(connections[using])
    return sorted({app for app, name in loader.graph.nodes if (app, name) not in loader.applied_migrations})


def not_migrated(error: Error, using: str) -> NotMigrated | None:
    """Return an error with advice if `error` reports a missing table or column, and migrations are not applied."""
    try:
        apps = unapplied_migrations(using) if is_missing(error) else []
    except Error:
        return None
    words, message = "{}. Migrations of {} are not applied: {}", " ".join(str(error).split("\n")[0].split())
    return NotMigrated(words.format(message, ", ".join(apps), how_to_migrate(using))) if apps else None


def how_to_migrate(using: str) -> str:
    """Return what to do if migrations are not applied."""
    is_in_memory = getattr(connections[using], "is_in_memory_db", None)  # of SQLite alone
    if is_in_memory is not None and is_in_memory():
        return "this database is in memory, so each process has an empty one of its own: name a file in DATABASES"
    return "run manage.py migrate"
