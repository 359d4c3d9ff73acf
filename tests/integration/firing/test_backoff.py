"""How long a timeout waits that cannot be fired through no fault of its own, and who hears of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

import django_delayq as dq
from django_delayq import clock
from django_delayq.firing import Work, run
from django_delayq.firing.state import _MAX_BACKOFFS, MISFIT_MAX_SECONDS, TimeoutBackoff
from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, make_due, session_options
from tests.integration.firing.handlers import Declare, Log, execute
from tests.integration.firing.rows import UNTRIED, tried
from tests.integration.firing.test_outside import raise_busy
from tests.testapp.models import Order, Plain

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def test_waits_double_from_a_tenth_of_a_second_with_jitter_up_to_the_ceiling() -> None:
    backoff = TimeoutBackoff()
    waits = [backoff.next_wait("default", 7, "held", 5.0).total_seconds() for _ in range(200)]
    for number, base in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 3.2)):
        assert base / 2 <= waits[number] <= base * 1.5
    assert all(2.5 <= wait <= 7.5 for wait in waits[6:])
    assert len(set(waits)) > 150


def test_each_timeout_of_each_database_waits_for_itself_and_what_is_remembered_is_bounded() -> None:
    backoff = TimeoutBackoff()
    for _ in range(5):
        backoff.next_wait("default", 7, "held", 5.0)
    assert backoff.next_wait("default", 8, "held", 5.0).total_seconds() <= 0.15
    assert backoff.next_wait("other", 7, "held", 5.0).total_seconds() <= 0.15
    backoff.reset("default", 7)
    assert backoff.next_wait("default", 7, "held", 5.0).total_seconds() <= 0.15
    for timeout_id in range(_MAX_BACKOFFS + 50):
        backoff.next_wait("default", timeout_id, "held", 5.0)
    assert len(backoff._waiting) == _MAX_BACKOFFS


def test_of_long_waits_for_one_reason_one_is_logged_each_minute(monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
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


def test_the_wait_after_a_transient_error_begins_when_the_handler_has_raised(order: Order, declare: Declare) -> None:
    """A handler that runs for longer than the wait would otherwise be called again at once, again and again."""
    with ExitStack() as clocks:

        def handler(obj: Order, timeout: Timeout) -> None:
            clocks.enter_context(clock.set_to(NOON + timedelta(minutes=1)))
            raise_busy()

        clocks.enter_context(clock.set_to(NOON))
        row = due(order, declare(Order, handler, name="deadlocks"))
        report = fire(row)
        assert report.again[row.pk] > NOON + timedelta(minutes=1)


@contextmanager
def without_a_column() -> Iterator[None]:
    """The table of orders lacks a column that the code reads."""
    execute(f"ALTER TABLE {Order._meta.db_table} RENAME COLUMN note TO former_note")
    try:
        yield
    finally:
        execute(f"ALTER TABLE {Order._meta.db_table} RENAME COLUMN former_note TO note")


@contextmanager
def without_a_permission() -> Iterator[None]:
    """The user of the worker may not update the table of orders, which locking a row requires."""
    role = f"clerk_{os.getpid()}"
    execute(f"CREATE ROLE {role}")
    try:
        execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        execute(f"REVOKE UPDATE ON {Order._meta.db_table} FROM {role}")
        execute(f"SET ROLE {role}")
        yield
    finally:
        execute("RESET ROLE")
        execute(f"DROP OWNED BY {role}")
        execute(f"DROP ROLE {role}")


ABSENT = [
    without_a_column,
    pytest.param(
        without_a_permission,
        marks=pytest.mark.skipif(
            connection.vendor != "postgresql", reason="SQLite has no users, and MySQL another kind of error"
        ),
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("absent", ABSENT)
def test_no_attempt_counts_while_tables_or_permissions_do_not_fit_the_code(
    order: Order, declare: Declare, absent: Callable[[], AbstractContextManager[None]], mode: str
) -> None:
    """A worker of a new release runs before its migration is applied, or one of the former release afterwards."""
    row = due(order, declare(Order, name="strict", retry=dq.Retry.never(), **MODES[mode]))
    with absent():
        assert list(fire(row).again) == [row.pk]
    assert tried(row) == UNTRIED
    assert fire(row).fired == (row.pk,)


def test_the_wait_of_a_process_whose_code_does_not_fit_stays_short(order: Order) -> None:
    """Workers of the new release may fire what it releases."""
    row = due(order)
    with without_a_column():
        for _ in range(12):
            report = run(Work(row.policy, (row.pk,), (row.object_id,)), "default")
            assert (report.again[row.pk] - database_now("default")).total_seconds() <= 1.5 * MISFIT_MAX_SECONDS
    assert tried(row) == UNTRIED


# A migration changes a column while workers run. What the server refuses once is repeated, and counts no attempt


on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="elsewhere no statement is prepared")
on_mysql = pytest.mark.skipif(connection.vendor != "mysql", reason="elsewhere an ALTER waits, or is seen")


@pytest.fixture
def prepared() -> Iterator[None]:
    """Prepare each statement on the server when it is executed for the second time."""
    with session_options(server_side_binding=True, prepare_threshold=1):
        yield


@pytest.fixture
def repeatable_reads() -> Iterator[None]:
    with session_options(isolation_level="repeatable read"):
        yield


def alter(sql: str) -> None:
    in_another_thread(lambda: execute(f"ALTER TABLE {sql}"))


def widen(size: int) -> None:
    alter(f"{Order._meta.db_table} ALTER COLUMN note TYPE varchar({size})")


@on_postgresql
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("reads", [False, True], ids=["", "in the handler too"])
def test_a_statement_that_was_prepared_counts_no_attempt(
    declare: Declare, options: dict[str, Any], reads: bool
) -> None:
    """PostgreSQL refuses it once. Timeouts without a retry were dead, although their handler had not been called."""

    def handler(*_: Any) -> None:
        if reads:
            Order.objects.get(pk=orders[0].pk)

    policy = declare(Order, handler, name="once", retry=dq.Retry.never(), **options)
    orders = [Order.objects.create() for _ in range(6)]
    for order in orders[:3]:
        fire(due(order, policy))
    try:
        widen(60)
        for order in orders[3:]:
            row = due(order, policy)
            for _ in range(4):
                make_due(row)
                fire(row)
    finally:
        widen(50)
    assert set(Timeout.objects.values_list("state", "attempts")) == {("fired", 1)}


@on_postgresql
@pytest.mark.usefixtures("prepared")
def test_a_prepared_statement_is_not_refused_again_and_again_outside_transactions(declare: Declare) -> None:
    """Only a rollback makes psycopg forget it. No attempt was counted, so the timeout neither fired nor was dead."""
    policy = declare(Order, lambda *_: list(Plain.objects.all()), name="reads", atomic=False, retry=dq.Retry.never())
    for _ in range(3):
        fire(due(Order.objects.create(), policy))
    row = due(Order.objects.create(), policy)
    table = Plain._meta.db_table
    alter(f"{table} ALTER COLUMN name TYPE varchar(30)")
    try:
        fire(row)
        make_due(row)
        assert fire(row).fired == (row.pk,)
    finally:
        alter(f"{table} ALTER COLUMN name TYPE varchar(20)")
    row.refresh_from_db()
    assert row.attempts == 1


@on_mysql
@pytest.mark.usefixtures("repeatable_reads")
@pytest.mark.parametrize("options", [{}, {"batch": 20}], ids=["alone", "batch"])
def test_a_table_altered_in_the_transaction_counts_no_attempt(
    declare: Declare, order: Order, options: dict[str, Any]
) -> None:
    """The server asks to repeat the transaction (1412). Timeouts without a retry were dead."""
    changes = [f"{Plain._meta.db_table} ADD COLUMN delayq_new int, ALGORITHM=COPY"]

    def handler(*_: Any) -> None:
        Order.objects.count()  # takes the snapshot
        if changes:
            alter(changes.pop())
        Plain.objects.count()

    policy = declare(Order, handler, name="once", retry=dq.Retry.never(), **options)
    row = due(order, policy)
    try:
        for _ in range(2):
            make_due(row)
            fire(row)
    finally:
        alter(f"{Plain._meta.db_table} DROP COLUMN delayq_new")
    assert list(Timeout.objects.values_list("state", "attempts")) == [("fired", 1)]
