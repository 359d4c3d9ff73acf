"""Connections that code has left in a transaction, or without autocommit: find them without a query, and close them."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_delayq.conf import ConfigError
from django_delayq.sql.dialects import dialect_of

logger = logging.getLogger("django_delayq.worker")


def close_left_open() -> int:
    """Close the connections of this thread that are in a transaction outside of `atomic()`. Return how many were.

    Code that switched autocommit off, or began a transaction by SQL, has left that to others. Their next `atomic()`
    would commit nothing, without an error.
    """
    left = [connection for connection in connections.all(initialized_only=True) if _is_left_open(connection)]
    for connection in left:
        reset(connection)
        logger.error(
            "The connection to database %r was left in a transaction or without autocommit. It is closed, and what was "
            "not committed is rolled back.",
            connection.alias,
            extra={"event": "connection_left"},
        )
    return len(left)


def _is_left_open(connection: BaseDatabaseWrapper) -> bool:
    if connection.connection is None or connection.in_atomic_block:
        return False
    has_setting = connection.autocommit == connection.settings_dict["AUTOCOMMIT"]
    return not has_setting or transaction_status(connection) in {"open", "failed"}


def transaction_status(connection: BaseDatabaseWrapper) -> str | None:
    """Return "idle", "open", "failed" or "closed", without a query; None: the driver does not know."""
    try:
        return dialect_of(connection).transaction_status(connection.connection)
    except Exception:  # noqa: BLE001 - whatever it is, the driver refuses all else, too
        return "closed"


def session_state(connection: BaseDatabaseWrapper) -> tuple[object, ...]:
    """Return the settings of the session that the driver knows without a query; empty if it is closed.

    PostgreSQL reports its own by itself, also if a function in the database has set them. They are left out inside a
    transaction, with which they may end.
    """
    driver, dialect = connection.connection, dialect_of(connection)
    try:
        settings = tuple([getattr(driver, name, None) for name in dialect.session_attributes])
        return settings if connection.in_atomic_block else (*settings, *dialect.reported(driver))
    except Exception:  # noqa: BLE001 - a closed connection keeps no setting
        return ()


def reset(connection: Any) -> None:
    """Roll back what is open on the connection, also inside `atomic()` blocks, and close it. Never raises.

    A connection of a pool is not lent again. The next use opens a new one, as Django configures it.
    """
    driver = connection.connection
    connection.in_atomic_block = connection.needs_rollback = connection.closed_in_transaction = False
    connection.savepoint_ids, connection.atomic_blocks, connection.run_on_commit = [], [], []
    connection.delayq_changed = None
    with contextlib.suppress(Exception):
        driver.rollback()  # the locks are released before the next firing begins, not when the server notices
    with contextlib.suppress(Exception):
        if getattr(connection, "pool", None) is not None:
            driver.close()  # so that the pool replaces it
        connection.close()
    with contextlib.suppress(Exception):
        if connection.connection is not None:  # a database in memory, which Django does not close
            connection.set_autocommit(connection.settings_dict["AUTOCOMMIT"])


def refuse_without_autocommit(using: str) -> None:
    """Raise ConfigError if the settings switch autocommit off: `atomic()` then commits nothing, without an error."""
    if not connections[using].settings_dict["AUTOCOMMIT"]:
        raise ConfigError(
            f"DATABASES[{using!r}]['AUTOCOMMIT'] is False, so that no transaction of a worker would be committed. "
            "Remove it."
        )
