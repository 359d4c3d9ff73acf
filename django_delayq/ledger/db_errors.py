"""Distinguish transient database errors from errors of a handler.

A deadlock, a serialization failure, a lock timeout, a lost connection, a server that restarts or is full: the firing
is rolled back and retried soon, and no attempt is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import connections
from django.db.utils import Error, InterfaceError, InternalError, OperationalError

from django_delayq.exceptions import NotMigrated
from django_delayq.ledger.db_connections import discard, error_code, is_read_only, is_usable

if TYPE_CHECKING:
    from django_delayq.firing.overlap import StatementMonitor

# SQLSTATE: serialization failure, deadlock, lock not available; insufficient resources, system error.
_POSTGRESQL = ("40001", "40P01", "55P03", "53", "58")
# Lock wait timeout, deadlock, record changed since last read, NOWAIT; too many connections, of the server, of
# the account.
_MYSQL = frozenset({1205, 1213, 1020, 3572, 1040, 1203, 1226})
# Undefined table, undefined column: SQLSTATE, and numbers of MySQL.
_MISSING = frozenset({"42P01", "42703", 1146, 1054})
# BUSY, LOCKED, IOERR, FULL, CANTOPEN, PROTOCOL: the low byte of SQLite's extended error codes.
_SQLITE = frozenset({5, 6, 10, 13, 14, 15})


def transient_reason(
    error: BaseException, using: str, monitor: StatementMonitor | None = None, driver_connection: object = None
) -> str | None:
    """Describe the transient database error that caused `error`; return None if the handler caused it.

    Call it after the rollback. A broken connection is closed, so that the next use opens another one.

    Args:
        error: the exception.
        using: the database.
        monitor: saw the handler's statements: the handler may have caught the database error and raised another one.
        driver_connection: `driver_connection_of(using)` from before the handler ran. A handler may use other databases,
            so a lost connection counts only if this one is lost, or replaced: leaving a transaction may have opened
            another one. None: no handler has run.
    """
    causes = [error, *(monitor.errors if monitor else ())]
    contention = next((cause for cause in causes if _is_contention(cause)), None)
    is_lost = any(map(_is_connection_error, causes)) and (
        driver_connection is None
        or driver_connection is not driver_connection_of(using)
        or not is_usable(connections[using])
    )
    if contention is not None and is_read_only(contention):
        discard(connections[using])  # the next connection may lead to the new primary
    if is_lost:
        if not is_usable(connections[using]):
            discard(connections[using])
        return f"the connection to the database failed ({_summary(error)})"
    return None if contention is None else _summary(contention)


def unapplied_migrations(using: str) -> list[str]:
    """Return the apps with migrations that are not applied to the database `using`. Raises the database's errors."""
    from django.db.migrations.loader import MigrationLoader  # which web processes do not need

    loader = MigrationLoader(connections[using])
    return sorted({app for app, name in loader.graph.nodes if (app, name) not in loader.applied_migrations})


def not_migrated(error: Error, using: str) -> NotMigrated | None:
    """Return an error with advice if `error` reports a missing table or column, and migrations are not applied."""
    is_missing = error_code(error) in _MISSING or str(error).startswith(("no such table", "no such column"))
    try:
        apps = unapplied_migrations(using) if is_missing else []
    except Error:
        return None
    words = "{}. Migrations of {} are not applied: run manage.py migrate"
    return NotMigrated(words.format(" ".join(str(error).split("\n")[0].split()), ", ".join(apps))) if apps else None


def driver_connection_of(using: str) -> object:
    """Return the open connection of this thread's driver, or None."""
    return connections[using].connection


def _is_connection_error(error: BaseException) -> bool:
    """Return whether a lost connection may have caused the error.

    psycopg raises InternalError if a server behind PgBouncer ends: a statement gets two replies. The server's own
    internal errors have a code.
    """
    if isinstance(error, InternalError):
        return error_code(error) is None
    return isinstance(error, OperationalError | InterfaceError)


def _is_contention(error: BaseException) -> bool:
    if not isinstance(error, Error):
        return False
    code = error_code(error)
    if is_read_only(error) or (isinstance(code, str) and code.startswith(_POSTGRESQL)):
        return True
    sqlite_code = getattr(error.__cause__, "sqlite_errorcode", None)
    return sqlite_code & 0xFF in _SQLITE if isinstance(sqlite_code, int) else code in _MYSQL


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
