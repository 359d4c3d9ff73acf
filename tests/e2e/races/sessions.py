"""A second session of the database, in a thread of this process: for interleavings that are the same each time."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections, transaction

from tests.e2e.races.actor import PATIENCE
from tests.support.waiting import wait_until

needs_row_locks = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has no row locks: a writer holds the whole database"
)

_WAITS_FOR_US = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
_WAITS_IN_DATABASE = r"TRX HAS BEEN WAITING .*\n.* table `{name}`\."
"""A transaction of this database waits for a lock, in the words of `SHOW ENGINE INNODB STATUS`."""


class Session:
    """`act` runs in a thread and session of its own, from now on."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    def end(self) -> None:
        """Wait for `act`, and raise its exception."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the other session hangs"
        if self._error is not None:
            raise self._error

    def wait_until_it_waits(self, sessions: int = 1) -> None:
        """Wait until the session waits for a lock of this transaction, or has finished without one.

        `sessions`: how many of them wait then, including this one.
        """
        wait_until(
            lambda: _waiting_sessions() >= sessions or not self._thread.is_alive(),
            "the other session waits for our lock",
        )


def _waiting_sessions() -> int:
    """Count the sessions that wait for a lock of this transaction; on MariaDB, for one in the database of this test.

    MariaDB names the blocking transaction only in `information_schema.innodb_lock_waits`. It fills this table again
    only after no session of the server has read it for a tenth of a second. Two test processes that wait in turns
    would read the old content until a lock times out.
    """
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_WAITS_FOR_US)
            return int(cursor.fetchone()[0])
        cursor.execute("SHOW ENGINE INNODB STATUS")
        name = re.escape(str(connection.settings_dict["NAME"]))
        return len(re.findall(_WAITS_IN_DATABASE.format(name=name), cursor.fetchone()[2]))


@contextmanager
def transaction_with(act: Callable[[], object]) -> Iterator[None]:
    """Another session has done `act` in a transaction, which ends with the block."""
    acted, end = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                act()
                acted.set()
                assert end.wait(PATIENCE)
        finally:
            acted.set()

    session = Session(hold)
    try:
        assert acted.wait(PATIENCE)
        yield
    finally:
        end.set()
        session.end()


def cross(act: Callable[[], object], first: Callable[[], object], then: Callable[[], object]) -> None:
    """Lock `first` here, let `act` wait for it in another session, and lock `then` here, which `act` must not hold."""
    with transaction.atomic():
        first()
        session = Session(act)
        session.wait_until_it_waits()
        then()
    session.end()


@contextmanager
def meanwhile(act: Callable[[], object], at: Callable[[str], object], *, before: bool = False) -> Iterator[None]:
    """Let the block be a transaction; after, or before, the first statement with `at`, another session begins `act`.

    It waits for this transaction then, or has finished.
    """
    sessions: list[Session] = []

    def begin(sql: str) -> None:
        if not sessions and at(sql):
            sessions.append(Session(act))
            sessions[0].wait_until_it_waits()

    def wrapper(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if before:
            begin(sql)
        done = execute(sql, *rest)
        begin(sql)
        return done

    with transaction.atomic(), connection.execute_wrapper(wrapper):
        yield
    assert sessions, "there was no such statement"
    sessions[0].end()


@contextmanager
def impatient() -> Iterator[None]:
    """Fail after waiting for a lock in this block for a second."""
    begin, end = {
        "postgresql": ("SET lock_timeout = '1s'", "SET lock_timeout = DEFAULT"),
        "mysql": ("SET innodb_lock_wait_timeout = 1", "SET innodb_lock_wait_timeout = DEFAULT"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(begin)
        try:
            yield
        finally:
            cursor.execute(end)


def deadlocks() -> int:
    """How many the server has counted so far: PostgreSQL in this database, MariaDB in all of them."""
    if connection.vendor == "sqlite":
        return 0
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        else:
            cursor.execute(
                "SELECT variable_value FROM information_schema.global_status WHERE variable_name = %s",
                ["INNODB_DEADLOCKS"],
            )
        return int(cursor.fetchone()[0])
