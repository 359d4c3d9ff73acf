"""What cannot be fired through no fault of its own is released for a short while, and no attempt is counted."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import Work, run
from django_delayq.firing.state import MISFIT_MAX_SECONDS, TimeoutBackoff
from django_delayq.ledger.db_connections import transient_reason
from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from tests.e2e.races.sessions import Session, needs_row_locks, transaction_with
from tests.integration.firing.conftest import (
    MODES,
    due,
    fire,
    in_another_thread,
    locking,
    make_due,
    state,
)
from tests.integration.firing.handlers import WAIT, Declare, Log, Patch, execute
from tests.integration.firing.rows import UNTRIED, tried
from tests.testapp.models import Customer, Effect, ExpressOrder, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
SOON = timedelta(seconds=1)


@needs_row_locks
@pytest.mark.parametrize("held", ["the object", "the row", "the parent's half of a child"])
def test_what_somebody_holds_is_put_back_for_a_short_while(declare: Declare, held: str) -> None:
    express = ExpressOrder.objects.create()
    row = due(express, declare(ExpressOrder, name="of_child"))
    locked = {"the object": express, "the row": row}.get(held) or Order.objects.get(pk=express.pk)
    with locking(locked):
        before = timezone.now()
        report = fire(row)
        assert before < report.again[row.pk] < timezone.now() + SOON
    assert (tried(row), row.history) == (UNTRIED, [])
    assert fire(row).fired == (row.pk,)


@needs_row_locks
def test_a_payment_that_commits_while_it_holds_the_row_wins(order: Order) -> None:
    row = due(order, "cancel_unpaid")

    def pay() -> None:
        locked = Order.objects.select_for_update().get(pk=order.pk)
        Order.objects.filter(pk=locked.pk).update(status="paid")

    with transaction_with(pay):
        assert set(fire(row).again) == {row.pk}
    fire(row)
    assert state(row) == ("skipped", "condition")


@pytest.mark.skipif(connection.vendor != "postgresql", reason="what PostgreSQL's FOR NO KEY UPDATE is for")
def test_children_can_be_inserted_while_their_parent_is_being_fired(declare: Declare) -> None:
    customer = Customer.objects.create()
    inserted: list[int] = []

    def insert() -> int:
        execute("SET lock_timeout = '2s'")
        return Order.objects.create(customer=customer).pk

    def handler(obj: Customer, timeout: Timeout) -> None:
        inserted.append(in_another_thread(insert))

    fire(due(customer, declare(Customer, handler, name="of_parent")))
    assert len(inserted) == 1


@needs_row_locks
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_a_deadlock_is_nobodys_fault_and_the_loser_comes_again(declare: Declare, is_swallowed: bool) -> None:
    """On MySQL it has rolled back the mark too: what the handler writes afterwards must not be committed alone."""
    mine, other = Order.objects.create(), Order.objects.create()
    turn, swallowed = threading.Barrier(2, timeout=WAIT), list[str]()

    def handler(obj: Order, timeout: Timeout) -> None:
        if connection.vendor == "postgresql":  # be the one who notices
            execute("SET LOCAL deadlock_timeout = '50ms'")
        else:  # InnoDB ends the transaction that has changed less
            Effect.objects.all().count()
        turn.wait()
        try:
            Order.objects.select_for_update().get(pk=other.pk)
        except OperationalError as error:
            if not is_swallowed:
                raise
            swallowed.append(str(error))
        if not swallowed or connection.vendor == "mysql":
            Effect.objects.create(what="done", object_id=obj.pk)

    def opponent() -> None:
        with transaction.atomic():
            Order.objects.filter(pk=other.pk).update(note="x")
            Effect.objects.bulk_create([Effect(what="heavy", object_id="x") for _ in range(50)])
            turn.wait()
            Order.objects.filter(pk=mine.pk).update(note="x")

    row = due(mine, declare(Order, handler, name="deadlocked"))
    session = Session(opponent)
    report = fire(row)
    session.end()
    assert set(report.again) == {row.pk}
    assert (tried(row), row.history, len(swallowed)) == (UNTRIED, [], int(is_swallowed))
    assert not Effect.objects.filter(what="done").exists()
    turn, swallowed = threading.Barrier(1), []
    make_due(row)
    assert fire(row).fired == (row.pk,)
    assert Effect.objects.filter(what="done").count() == 1


@pytest.mark.skipif(connection.vendor != "postgresql", reason="isolation levels as PostgreSQL has them")
def test_a_serialization_failure_counts_no_attempt(order: Order, declare: Declare) -> None:
    statement = "DO $$ BEGIN RAISE EXCEPTION 'could not serialize' USING ERRCODE = '40001'; END $$"
    row = due(order, declare(Order, lambda obj, timeout: execute(statement), name="unserializable"))
    assert set(fire(row).again) == {row.pk}
    assert tried(row) == UNTRIED


TABLE = Order._meta.db_table


def test_of_long_waits_for_one_reason_one_is_logged_each_minute(monkeypatch: Patch, caplog: Log) -> None:
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


class Refused(Exception):
    """An error of a driver: with an SQLSTATE, a number of MySQL, or an extended result code of SQLite."""

    def __init__(self, code: str | int) -> None:
        super().__init__(code)
        self.sqlstate = code if isinstance(code, str) else ""
        self.sqlite_errorcode = code if isinstance(code, int) and code < 1000 else None


CODES: list[str | int] = ["40001", "40P01", "55P03", "53300", "58030", 1205, 1213, 1467, 1020, 1412, 1040, 5, 261, 14]


def test_a_refusal_of_the_database_is_transient() -> None:
    for code in CODES:
        error = OperationalError("refused")
        error.__cause__ = Refused(code)
        assert transient_reason(error, "default", driver_connection=connection.connection), code


@pytest.mark.parametrize("mode", MODES)
def test_while_the_tables_do_not_fit_the_code_no_attempt_counts(order: Order, declare: Declare, mode: str) -> None:
    """A worker of a new release runs before its migration is applied, and others may fire what it releases."""
    row = due(order, declare(Order, name="strict", retry=dq.Retry.never(), **MODES[mode]))
    execute(f"ALTER TABLE {TABLE} RENAME COLUMN note TO former_note")
    try:
        for _ in range(8):
            report = run(Work(row.policy, (row.pk,), (row.object_id,)), "default")
            assert (report.again[row.pk] - database_now("default")).total_seconds() <= 1.5 * MISFIT_MAX_SECONDS
    finally:
        execute(f"ALTER TABLE {TABLE} RENAME COLUMN former_note TO note")
    assert tried(row) == UNTRIED
    assert fire(row).fired == (row.pk,)
