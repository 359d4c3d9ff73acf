"""How long a timeout waits that cannot be fired through no fault of its own, and who hears of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

import django_delayq as dq
from django_delayq import clock
from django_delayq.firing.state import _MAX_BACKOFFS, TimeoutBackoff
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, state
from tests.testapp.models import Order

Declare = Callable[..., dq.TimeoutPolicy[Any]]
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


class Deadlock(Exception):
    sqlstate, sqlite_errorcode = "40P01", 6


def test_waits_double_from_a_tenth_of_a_second_with_jitter_up_to_the_ceiling() -> None:
    backoff = TimeoutBackoff()
    waits = [backoff.next_wait("default", 7, "held", 5.0).total_seconds() for _ in range(200)]
    for number, base in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 3.2)):
        assert base / 2 <= waits[number] <= base * 1.5
    assert all(2.5 <= wait <= 7.5 for wait in waits[6:])
    assert len(set(waits)) > 150


def test_each_timeout_of_each_database_waits_for_itself() -> None:
    backoff = TimeoutBackoff()
    for _ in range(5):
        backoff.next_wait("default", 7, "held", 5.0)
    assert backoff.next_wait("default", 8, "held", 5.0).total_seconds() <= 0.15
    assert backoff.next_wait("other", 7, "held", 5.0).total_seconds() <= 0.15
    backoff.reset("default", 7)
    assert backoff.next_wait("default", 7, "held", 5.0).total_seconds() <= 0.15


def test_of_the_long_waits_for_one_reason_one_is_logged_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing column, or an import that locks all objects, holds thousands of timeouts back."""
    now = [1000.0]
    monkeypatch.setattr("django_delayq.firing.state.time.monotonic", lambda: now[0])
    backoff = TimeoutBackoff()
    for _ in range(91):
        for timeout_id in range(100):
            backoff.next_wait("default", timeout_id, "a column is missing" if timeout_id else "deadlock", 5.0)
        now[0] += 1
    words = [record.getMessage().partition(" to be fired: ") for record in caplog.records]
    found = [("Timeout 0 has waited {} s", "deadlock"), ("Timeout 1 has waited {} s", "a column is missing")]
    assert [(text, why) for text, _, why in words] == [(t.format(s), why) for s in (30, 90) for t, why in found]


def test_what_it_remembers_is_bounded() -> None:
    backoff = TimeoutBackoff()
    for timeout_id in range(_MAX_BACKOFFS + 50):
        backoff.next_wait("default", timeout_id, "held", 5.0)
    assert len(backoff._waiting) == _MAX_BACKOFFS


@pytest.mark.django_db(transaction=True)
def test_the_wait_after_a_transient_error_begins_when_the_handler_has_raised(order: Order, declare: Declare) -> None:
    """A handler that runs for longer than the wait would otherwise be called again at once, again and again."""
    with ExitStack() as clocks:

        def handler(obj: Order, timeout: Timeout) -> None:
            clocks.enter_context(clock.set_to(NOON + timedelta(minutes=1)))
            raise OperationalError from Deadlock()

        clocks.enter_context(clock.set_to(NOON))
        row = due(order, declare(Order, handler, name="deadlocks"))
        report = fire(row)
        assert report.again[row.pk] > NOON + timedelta(minutes=1)


@contextmanager
def without_a_column() -> Iterator[None]:
    """The table of orders lacks a column that the code reads."""

    def rename(before: str, after: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {Order._meta.db_table} RENAME COLUMN {before} TO {after}")

    rename("note", "former_note")
    try:
        yield
    finally:
        rename("former_note", "note")


@contextmanager
def without_a_permission() -> Iterator[None]:
    """The user of the worker may not update the table of orders, which locking a row requires."""
    role = f"clerk_{os.getpid()}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        try:
            cursor.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
            cursor.execute(f"REVOKE UPDATE ON {Order._meta.db_table} FROM {role}")
            cursor.execute(f"SET ROLE {role}")
            yield
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("mode", MODES)
def test_no_attempt_counts_while_the_tables_do_not_fit_the_code(order: Order, declare: Declare, mode: str) -> None:
    """A worker of a new release runs before its migration is applied, or one of the former release afterwards."""
    row = due(order, declare(Order, name="strict", retry=dq.Retry.never(), **MODES[mode]))
    with without_a_column():
        assert list(fire(row).again) == [row.pk]
    assert (state(row), row.attempts) == (("pending", ""), 0)
    assert fire(row).fired == (row.pk,)


@pytest.mark.dialect
@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(
    connection.vendor != "postgresql", reason="of PostgreSQL; SQLite has no users, and MySQL another kind of error"
)
@pytest.mark.parametrize("mode", MODES)
def test_no_attempt_counts_while_a_permission_is_missing_before_the_handler(
    order: Order, declare: Declare, mode: str
) -> None:
    """Otherwise all due timeouts are late by up to fifteen hours once it is granted, or dead after a day."""
    row = due(order, declare(Order, name="strict", retry=dq.Retry.never(), **MODES[mode]))
    with without_a_permission():
        assert list(fire(row).again) == [row.pk]
    assert (state(row), row.attempts) == (("pending", ""), 0)
    assert fire(row).fired == (row.pk,)
