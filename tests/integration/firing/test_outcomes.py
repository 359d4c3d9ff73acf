"""What a handler raises, and what becomes of its timeout: failures, ladders, broken transactions, lost races."""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models import Q
from django.db.transaction import TransactionManagementError
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import Timeout
from tests.integration.firing.conftest import (
    FIRED,
    MODES,
    PENDING,
    UNTRIED,
    Declare,
    Handler,
    due,
    execute,
    fire,
    in_another_thread,
    locking,
    needs_row_locks,
    once_at,
    raising,
    state,
    tried,
    write,
    write_and_raise,
    written,
)
from tests.testapp.models import Customer, Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def test_a_failure_undoes_the_work_and_keeps_its_error_for_the_next_attempt(order: Order, declare: Declare) -> None:
    retry = dq.Retry([timedelta(minutes=5)])
    row = due(order, declare(Order, write_and_raise(ValueError("no")), name="fails", retry=retry))
    report = fire(row)
    assert (written(), tried(row), row.slot_taken, row.settled_at) == ([], (PENDING, 1), 1, None)
    assert report.again == {row.pk: row.run_at}
    assert timedelta(minutes=4, seconds=50) < row.run_at - timezone.now() <= timedelta(minutes=5)
    [error] = row.errors
    assert (error["error"], error["attempt"], error["message"]) == ("ValueError", 1, "no")
    assert "raise error" in error["traceback"]
    assert row.due_at < row.run_at


def test_the_ladder_is_climbed_step_by_step_and_ends_dead(order: Order, declare: Declare) -> None:
    now = datetime(2026, 5, 1, tzinfo=UTC)
    with clock.set_to(now):
        row = due(order, declare(Order, raising(ValueError("again")), name="ladder", retry=dq.Retry([0, 60, 600])))
    for wait in (0, 60, 600):
        with clock.set_to(now):
            fire(row)
        assert state(row) == PENDING
        assert row.run_at - now == timedelta(seconds=wait)
        now = row.run_at
    with clock.set_to(now):
        assert fire(row).done == (row.pk,)
    assert (tried(row), row.reason, row.slot_taken) == ((("dead", "retries"), 4), "ValueError: again", None)
    assert [error["attempt"] for error in row.errors] == [1, 2, 3, 4]


def test_without_a_ladder_of_its_own_a_policy_has_the_one_of_the_settings(
    order: Order, declare: Declare, settings: Any
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETRY": dq.Retry([7200])}
    row = due(order, declare(Order, raising(ValueError()), name="default"))
    fire(row)
    state(row)
    assert timedelta(hours=1, minutes=59) < row.run_at - timezone.now() <= timedelta(hours=2)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [(dq.Skip, ("skipped", "handler")), (dq.GiveUp, ("dead", "handler")), (dq.Snooze, ("dead", "retries"))],
)
def test_an_outcome_of_the_project_that_does_not_call_its_base_ends_the_round_too(
    order: Order, declare: Declare, outcome: Any, expected: tuple[str, str]
) -> None:
    own = type("Own", (outcome,), {"__init__": lambda self, order: None})
    row = due(order, declare(Order, raising(own(order)), name="own", retry=dq.Retry.never()))
    fire(row)
    assert state(row) == expected


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


STRANGE = {
    "the end of the process": (SystemExit(3), "SystemExit"),
    "letters that no database takes": (ValueError("no\0 \ud800"), "ValueError"),
    "an error without a message": (Unspeakable(), "Unspeakable"),
    "a snooze beyond all calendars": (dq.Snooze(weeks=10_000), "InvalidDelay"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_whatever_is_raised_is_a_failure_that_is_recorded(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.CRITICAL, logger="django_delayq.firing")  # what records the log cannot send it on
    error, name = STRANGE[kind]
    row = due(order, declare(Order, write_and_raise(error), name="strange", retry=dq.Retry([60])))
    fire(row)
    assert (tried(row), row.errors[0]["error"], written()) == ((PENDING, 1), name, [])


def test_keyboard_interrupt_passes_when_the_work_is_undone(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, write_and_raise(KeyboardInterrupt()), name="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        fire(row)
    assert (written(), tried(row)) == ([], UNTRIED)


# Others who change the row between the failure and its record


@pytest.mark.parametrize("meanwhile", ["moved", "cancelled", "replaced"])
@pytest.mark.parametrize("fails", ["handler", "condition"])
def test_a_failure_loses_against_whoever_changed_the_row_meanwhile(
    order: Order, declare: Declare, meanwhile: str, fails: str
) -> None:
    policy = declare(Order, raising(ValueError()), name="loses", retry=dq.Retry([0]))
    row = due(order, policy)
    if fails == "condition":
        object.__setattr__(policy, "when", Q(no_such_field=1))

    def change() -> Any:
        if meanwhile == "moved":
            return dq.reschedule_timeout(order, policy, hours=5)
        if meanwhile == "cancelled":
            return dq.cancel_timeout(order, policy)
        return dq.schedule_timeout(order, policy, hours=5)

    set_checkpoint_hook(lambda step: in_another_thread(change) if step == "undone" else None)
    report = fire(row)
    if meanwhile == "cancelled":
        assert (state(row), report.done) == (("cancelled", "hand"), (row.pk,))
    else:
        assert (tried(row), row.errors, report.again) == (UNTRIED, [], {row.pk: row.run_at})
        assert row.run_at - timezone.now() > timedelta(hours=4)


@needs_row_locks
@pytest.mark.dialect
def test_a_row_that_is_held_while_its_failure_is_recorded_comes_again(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(ValueError()), name="held", retry=dq.Retry([0])))
    with contextlib.ExitStack() as held:
        once_at("undone", lambda: held.enter_context(locking(row)))
        report = fire(row)
    assert (set(report.again), tried(row)) == ({row.pk}, UNTRIED)


def test_a_member_that_cannot_be_recorded_hides_nothing_of_the_others(
    orders: list[Order], declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk == orders[2].pk:
            raise ValueError

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot be written")

    policy = declare(Order, handler, name="one_fails", together=20)
    rows = [due(order, policy) for order in orders]
    monkeypatch.setattr("django_delayq.firing.attempt.settle", refuse)
    report = fire(*rows)
    assert set(report.fired) == {row.pk for row in rows} - {rows[2].pk}
    assert list(report.again) == [rows[2].pk]


# Transactions that a handler breaks


def swallow_integrity_error(obj: Order, timeout: Timeout) -> None:
    Customer.objects.create(pk=1)
    with contextlib.suppress(IntegrityError):
        Customer.objects.create(pk=1)


def mark_for_rollback(obj: Order, timeout: Timeout) -> None:
    transaction.set_rollback(True)


def close_connection(obj: Order, timeout: Timeout) -> None:
    write(obj, timeout)
    connection.close()


def rolling_back(sql: Any) -> Handler:
    def roll_back_by_hand(obj: Order, timeout: Timeout) -> None:
        write(obj, timeout)
        execute(sql)

    return roll_back_by_hand


ROLLBACKS: list[Any] = ["ROLLBACK"]
if connection.vendor == "postgresql":
    from psycopg.sql import SQL

    ROLLBACKS += ["ABORT", SQL("{}").format(SQL("ROLLBACK"))]
BREAKING = [swallow_integrity_error, mark_for_rollback, close_connection, *map(rolling_back, ROLLBACKS)]


@pytest.mark.parametrize("handler", BREAKING)
def test_a_handler_that_breaks_its_transaction_has_failed(order: Order, declare: Declare, handler: Handler) -> None:
    row = due(order, declare(Order, handler, name="breaks", retry=dq.Retry([60])))
    fire(row)
    assert (tried(row), row.errors[0]["error"], written()) == ((PENDING, 1), "BrokenTransaction", [])
    assert "transaction" in row.errors[0]["message"] or "connection" in row.errors[0]["message"]


def test_after_a_rollback_by_hand_no_other_statement_of_the_handler_is_executed(order: Order, declare: Declare) -> None:
    """It would be committed, or refused, without the mark on the row."""
    refused: list[str] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        execute("ROLLBACK")
        try:
            Order.objects.count()
        except TransactionManagementError as error:
            refused.append(str(error))

    row = due(order, declare(Order, handler, name="continues", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.errors[0]["error"], len(refused)) == (PENDING, "BrokenTransaction", 1)


def test_a_swallowed_error_fails_the_attempt_only_where_it_ends_the_transaction(order: Order, declare: Declare) -> None:
    def swallow(obj: Order, timeout: Timeout) -> None:
        with contextlib.suppress(DatabaseError):
            execute("SELECT no_such_column FROM testapp_order")

    row = due(order, declare(Order, swallow, name="swallows", retry=dq.Retry([60])))
    fire(row)
    if connection.vendor == "postgresql":
        assert (state(row), row.errors[0]["error"]) == (PENDING, "BrokenTransaction")
        assert "no_such_column" in row.errors[0]["traceback"]
    else:
        assert state(row) == FIRED


def test_an_error_caught_around_an_atomic_block_is_no_failure(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Customer.objects.create(pk=1)
        with contextlib.suppress(IntegrityError), transaction.atomic():
            Customer.objects.create(pk=1)
        Effect.objects.create(what="caught", object_id="x")

    assert fire(due(order, declare(Order, handler, name="careful"))).fired
    assert Effect.objects.get().what == "caught"


def test_a_callback_on_commit_that_raises_does_not_undo_what_is_committed(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        transaction.on_commit(lambda: ran.append("first"))
        transaction.on_commit(lambda: 1 / 0)
        transaction.on_commit(lambda: ran.append("last"))

    row = due(order, declare(Order, handler, name="callbacks"))
    assert fire(row).fired == (row.pk,)
    assert (state(row), ran) == (FIRED, ["first", "last"])
    assert "on_commit" in caplog.text


def test_a_condition_that_the_database_refuses_counts_as_failed_attempts(order: Order, declare: Declare) -> None:
    """A column that a migration has yet to add must neither stop the worker nor be retried indefinitely unnoticed."""
    row = due(order, declare(Order, name="ahead", retry=dq.Retry([60])))
    object.__setattr__(dq.get_policy(row.policy), "when", Q(no_such_field=1))
    fire(row)
    assert (tried(row), row.errors[0]["error"]) == ((PENDING, 1), "FieldError")


# Transactions by hand: one that would end before the handler is refused, one outside is undone unless it was ended


COMMITS = ["COMMIT", "begin", "/* the\nend */ COMMIT"]
DDL = ["CREATE TABLE delayq_new (id int)", "set @@session.autocommit = ON", "FLUSH STATUS"]


@pytest.mark.parametrize("sql", [*COMMITS, *DDL])
@pytest.mark.parametrize("mode", ["alone", "batch", "together"])
def test_a_statement_that_would_commit_before_the_end_of_the_handler_is_refused(
    orders: list[Order], declare: Declare, sql: str, mode: str
) -> None:
    """The timeouts would be fired for good, although the handler fails after that. See `effects_of` for all of them."""
    if sql in DDL and connection.features.can_rollback_ddl:
        pytest.skip("this database can roll DDL back")

    def handler(*_: Any) -> None:
        Effect.objects.create(what="half")
        execute(sql)
        raise ValueError("the second half")

    policy = declare(Order, handler, name="commits", retry=dq.Retry([60]), **MODES[mode])
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert {state(row)[0] for row in rows} == {"pending"}
    assert rows[0].errors[0]["error"] == "BrokenTransaction"
    assert "atomic=False" in rows[0].errors[0]["message"]
    assert not Effect.objects.exists()


ALLOWED = ["CREATE TEMPORARY TABLE delayq_new (id int)"]
if connection.vendor == "mysql":
    ALLOWED += ["DROP TEMPORARY TABLE IF EXISTS delayq_new", "SET @password = 'autocommit'"]
    ALLOWED += ["SET STATEMENT max_statement_time = 100 FOR UPDATE testapp_effect SET what = 'password, autocommit'"]


@pytest.mark.parametrize("sql", ALLOWED)
def test_a_statement_that_commits_nothing_is_none_of_them(order: Order, declare: Declare, sql: str) -> None:
    row = due(order, declare(Order, lambda obj, timeout: execute(sql), name="executes"))
    fire(row)
    assert state(row) == FIRED
    execute("DROP TABLE IF EXISTS delayq_new")


BY_HAND = {
    "ended": (["BEGIN", "{write}", "COMMIT"], True),
    "left open": (["BEGIN", "{write}"], False),
    "left open behind a savepoint": (["BEGIN", "{write}", "SAVEPOINT a", "ROLLBACK TO SAVEPOINT a"], False),
}
if connection.vendor == "mysql":
    BY_HAND["XA, ended"] = (["XA START 'a'", "{write}", "XA END 'a'", "XA COMMIT 'a' ONE PHASE"], True)


@pytest.mark.parametrize("left", BY_HAND)
def test_a_transaction_by_hand_outside_of_one_is_undone_unless_it_was_ended(
    order: Order, declare: Declare, left: str
) -> None:
    statements, is_kept = BY_HAND[left]

    def handler(*_: Any) -> None:
        write = f"UPDATE testapp_order SET status = 'done' WHERE id = {order.pk}"
        for statement in statements:
            execute(statement.format(write=write))

    row = due(order, declare(Order, handler, name="by_hand", atomic=False, retry=dq.Retry([60])))
    assert bool(fire(row).fired) == is_kept
    assert Order.objects.get(pk=row.object_id).status == ("done" if is_kept else "unpaid")
