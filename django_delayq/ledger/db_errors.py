"""Database errors that are nobody's fault, told apart from errors of a handler.

A deadlock, a serialization failure, a lock that took too long, a lost connection, a server that restarts or is
full: the firing is undone and repeated soon, and no attempt is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import connections
from django.db.utils import Error, InterfaceError, OperationalError

from django_delayq.ledger.db_connections import discard, error_code, is_read_only, is_usable

if TYPE_CHECKING:
    from django_delayq.firing.overlap import StatementMonitor

# SQLSTATE: serialization failure, deadlock, lock not available; insufficient resources, system error.
_POSTGRESQL = ("40001", "40P01", "55P03", "53", "58")
# Lock wait timeout, deadlock, record changed since last read, NOWAIT; too many connections, of the server, of
# the account.
_MYSQL = frozenset({1205, 1213, 1020, 3572, 1040, 1203, 1226})
# BUSY, LOCKED, IOERR, FULL, CANTOPEN, PROTOCOL: the low byte of SQLite's extended error codes.
_SQLITE = frozenset({5, 6, 10, 13, 14, 15})


def trouble_of(
    error: BaseException, using: str, watch: StatementMonitor | None = None, link: object = None
) -> str | None:
    """In a few words, what trouble of the database `error` stems from; None: it is the handler's own.

    Called after the transaction is undone. A connection that broke is closed, so that the next use connects anew.

    Args:
        error: what was raised.
        using: the database.
        watch: who saw the handler's statements: it may have caught the database's error and raised another one.
        link: `link_of(using)` from before the handler ran. A handler may talk to other databases, so that a
            lost connection is ours only if ours is gone, or another one by now: leaving a transaction may
            have opened a new one. None: no handler has run, and every statement was ours.
    """
    causes = [error, *(watch.errors if watch else ())]
    contention = next((cause for cause in causes if _is_contention(cause)), None)
    lost = any(isinstance(cause, OperationalError | InterfaceError) for cause in causes) and (
        link is None or link is not link_of(using) or not is_usable(connections[using])
    )
    if contention is not None and is_read_only(contention):
        discard(connections[using])  # the next connection may lead to the new primary
    if lost:
        if not is_usable(connections[using]):
            discard(connections[using])
        return f"the connection to the database failed ({_words(error)})"
    return None if contention is None else _words(contention)


def link_of(using: str) -> object:
    """The driver's connection that this thread has open now; None: there is none."""
    return connections[using].connection


def _is_contention(error: BaseException) -> bool:
    if not isinstance(error, Error):
        return False
    if is_read_only(error):
        return True
    code = error_code(error)
    if isinstance(code, str):
        return code.startswith(_POSTGRESQL)
    cause = error.__cause__
    if isinstance(getattr(cause, "sqlite_errorcode", None), int):
        return cause.sqlite_errorcode & 0xFF in _SQLITE  # type: ignore[union-attr]
    return code in _MYSQL


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
