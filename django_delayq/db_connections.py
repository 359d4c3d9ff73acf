"""The database connections of a worker's threads: open them early, test idle ones, and close those that are broken."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_delayq.worker")

IDLE_SECONDS: Final = 60.0
"""A connection that was idle for longer is tested before it is used, because firewalls cut silent connections."""


def open_connection(using: str) -> bool:
    """This thread's connection to the database is open; False: it cannot be opened just now."""
    try:
        connections[using].ensure_connection()
    except Exception as error:  # noqa: BLE001 - the next query will say it again to somebody who can act on it
        logger.debug("no connection to database %r yet: %s", using, error)
        return False
    return True


def check_connections(idle_seconds: float = 0.0) -> None:
    """This thread's database connections are sound, or closed, so that their next use opens them anew.

    Django closes a connection after each request unless CONN_MAX_AGE says otherwise. A worker has no requests, and
    opening one would cost more than most firings; so a connection stays open as long as it works, or for
    CONN_MAX_AGE seconds if that is set.
    """
    for connection in connections.all(initialized_only=True):
        if connection.connection is None or connection.in_atomic_block:
            continue
        if _is_too_old(connection) or (
            (connection.errors_occurred or idle_seconds > IDLE_SECONDS) and not _is_usable(connection)
        ):
            with contextlib.suppress(Exception):
                connection.close()


def _is_too_old(connection: BaseDatabaseWrapper) -> bool:
    has_age = bool(connection.settings_dict["CONN_MAX_AGE"])
    return has_age and connection.close_at is not None and time.monotonic() >= connection.close_at


def _is_usable(connection: BaseDatabaseWrapper) -> bool:
    try:
        usable = connection.is_usable()
    except Exception:  # noqa: BLE001 - then it is not
        return False
    if usable:
        connection.errors_occurred = False
    return usable
