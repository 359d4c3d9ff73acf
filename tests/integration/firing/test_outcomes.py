"""What a handler raises, and what becomes of its timeout: outcomes, failures, ladders, broken transactions."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
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
from tests.integration.firing.conftest import due, fire, in_another_thread, locking, make_due, state
from tests.testapp.models import Customer, Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
PENDING = ("pending", "")


def raising(error: BaseException, *, times: int = 10**6) -> Callable[[Any, Any], None]:
    """A handler that writes an effect and then raises, the first `times` times."""
    left = [times]

    def handler(obj: Any, timeout: Timeout) -> None:
        Effect.objects.create(what="undone", object_id="x")
        obj.note = "undone"
        obj.save()
        left[0] -= 1
        if left[0] >= 0:
            raise error

    return handler


def is_undone() -> bool:
    return not Effect.objects.exists() and not Order.objects.filter(note="undone").exists()


def test_a_failure_undoes_the_work_and_keeps_its_error_for_the_next_attempt(order: Order, declare: Declare) -> None:
    policy = declare(Order, raising(ValueError("no")), name="fails", retry=dq.Retry([timedelta(minutes=5)]))
    row = due(order, policy)
    report = fire(row)
    assert is_undone()
    assert state(row) == PENDING
    assert report.again == {row.pk: row.run_at}
    assert timedelta(minutes=4, seconds=50) < row.run_at - timezone.now() <= timedelta(minutes=5)
    assert (row.attempts, row.slot_taken, row.settled_at) == (1, 1, None)
    [error] = row.errors
    assert (error["error"], error["attempt"]) == ("ValueError", 1)
    assert "no" in error["message"]
    assert "raise error" in error["traceback"]
    assert row.due_at < row.run_at


def test_an_error_in_letters_that_no_database_takes_is_kept_all_the_same(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="django_delayq.firing")  # what records the log cannot send it on
    row = due(order, declare(Order, raising(ValueError("no\0 \ud800")), name="letters", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.attempts) == (PENDING, 1)
    assert row.errors[0]["message"].startswith("no")


def test_the_ladder_is_climbed_step_by_step_and_ends_dead(order: Order, declare: Declare) -> None:
    policy = declare(Order, raising(ValueError("again")), name="ladder", retry=dq.Retry([0, 60, 600]))
    start = datetime(2026, 5, 1, tzinfo=UTC)
    with clock.set_to(start):
        row = due(order, policy)
    now, waits = start, []
    for _ in range(3):
        with clock.set_to(now):
            fire(row)
        state(row)
        waits.append((row.run_at - now).total_seconds())
        now = row.run_at
    assert waits == [0, 60, 600]
    with clock.set_to(now):
        report = fire(row)
    assert report.done == (row.pk,)
    assert state(row) == ("dead", "retries")
    assert (row.attempts, row.reason, len(row.errors), row.slot_taken) == (4, "ValueError: again", 4, None)
    assert [error["attempt"] for error in row.errors] == [1, 2, 3, 4]


def test_retry_never_ends_with_the_first_failure(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(ValueError()), name="once", retry=dq.Retry.never()))
    fire(row)
    assert (state(row), row.attempts) == (("dead", "retries"), 1)


def test_without_a_ladder_of_its_own_a_policy_has_the_one_of_the_settings(
    order: Order, declare: Declare, settings: Any
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETRY": dq.Retry([7200])}
    row = due(order, declare(Order, raising(ValueError()), name="default"))
    fire(row)
    state(row)
    assert timedelta(hours=1, minutes=59) < row.run_at - timezone.now() <= timedelta(hours=2)


def test_a_handler_that_recovers_fires_with_its_attempts_counted(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(ValueError(), times=2), name="recovers", retry=dq.Retry([0, 0])))
    for _ in range(3):
        fire(row)
    assert (state(row), row.attempts, len(row.errors)) == (("fired", "due"), 3, 2)
    assert Effect.objects.count() == 1


def test_snooze_waits_and_counts_no_attempt(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(dq.Snooze(minutes=5, reason="not yet")), name="snoozes"))
    deadline = row.due_at
    report = fire(row)
    assert is_undone()
    assert (state(row), row.attempts, row.errors, row.due_at) == (PENDING, 0, [], deadline)
    assert report.again == {row.pk: row.run_at}
    assert timedelta(minutes=4) < row.run_at - timezone.now() <= timedelta(minutes=5)
    [event] = row.history
    assert (event["what"], event["reason"]) == ("snoozed", "not yet")


def test_snooze_until_a_moment_that_has_passed_means_now(order: Order, declare: Declare) -> None:
    past = timezone.now() - timedelta(days=1)
    row = due(order, declare(Order, raising(dq.Snooze(at=past), times=1), name="snoozes_past"))
    fire(row)
    assert state(row) == PENDING
    assert row.run_at > past + timedelta(hours=23)
    assert fire(row).fired


def test_skip_settles_without_an_effect(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(dq.Skip("nothing to do")), name="skips"))
    assert fire(row).done == (row.pk,)
    assert is_undone()
    assert (state(row), row.reason, row.slot_taken) == (("skipped", "handler"), "nothing to do", None)


def test_give_up_is_dead_at_once(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(dq.GiveUp("no such account " + "x" * 300)), name="gives_up"))
    assert fire(row).done == (row.pk,)
    assert is_undone()
    assert state(row) == ("dead", "handler")
    assert row.reason.startswith("no such account")


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


def test_system_exit_is_a_failure_and_not_the_end_of_the_worker(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(SystemExit(3)), name="exits", retry=dq.Retry.never()))
    fire(row)
    assert is_undone()
    assert state(row) == ("dead", "retries")
    assert row.errors[0]["error"] == "SystemExit"


def test_keyboard_interrupt_passes_when_the_work_is_undone(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(KeyboardInterrupt()), name="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        fire(row)
    assert is_undone()
    assert (state(row), row.attempts) == (PENDING, 0)


@pytest.mark.parametrize("meanwhile", ["moved", "cancelled", "replaced"])
def test_a_failure_loses_against_whoever_changed_the_row_meanwhile(
    order: Order, declare: Declare, meanwhile: str
) -> None:
    policy = declare(Order, raising(ValueError()), name="loses", retry=dq.Retry([0]))
    row = due(order, policy)

    def change() -> Any:
        if meanwhile == "moved":
            return dq.reschedule_timeout(order, policy, hours=5)
        if meanwhile == "cancelled":
            return dq.cancel_timeout(order, policy)
        return dq.schedule_timeout(order, policy, hours=5)

    set_checkpoint_hook(lambda step: in_another_thread(change) if step == "undone" else None)
    report = fire(row)
    set_checkpoint_hook(None)
    if meanwhile == "cancelled":
        assert (state(row), report.done) == (("cancelled", "hand"), (row.pk,))
    else:
        assert (state(row), row.attempts, row.errors) == (PENDING, 0, [])
        assert report.again == {row.pk: row.run_at}
        assert row.run_at - timezone.now() > timedelta(hours=4)


@pytest.mark.dialect
def test_a_row_that_is_held_while_its_failure_is_recorded_comes_again(order: Order, declare: Declare) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no row locks")
    row = due(order, declare(Order, raising(ValueError()), name="held", retry=dq.Retry([0])))
    held: list[Any] = []

    def hold(step: str) -> None:
        if step == "undone" and not held:
            held.append(locking(row))
            held[0].__enter__()

    set_checkpoint_hook(hold)
    report = fire(row)
    held[0].__exit__(None, None, None)
    assert set(report.again) == {row.pk}
    assert (state(row), row.attempts) == (PENDING, 0)


def swallow_integrity_error(obj: Order, timeout: Timeout) -> None:
    Customer.objects.create(pk=1)
    with contextlib.suppress(IntegrityError):
        Customer.objects.create(pk=1)


def swallow_in_plain_sql(obj: Order, timeout: Timeout) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT no_such_column FROM testapp_order")
    except DatabaseError:
        pass


def mark_for_rollback(obj: Order, timeout: Timeout) -> None:
    transaction.set_rollback(True)


def close_connection(obj: Order, timeout: Timeout) -> None:
    Effect.objects.create(what="lost", object_id="x")
    connection.close()


def rolling_back(sql: Any) -> Callable[..., None]:
    def roll_back_by_hand(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="lost", object_id="x")
        with connection.cursor() as cursor:
            cursor.execute(sql)

    return roll_back_by_hand


ROLLBACKS: list[Any] = ["ROLLBACK", "\n    rollback\n", "/* the end */ ROLLBACK"]
if connection.vendor == "postgresql":
    from psycopg.sql import SQL

    ROLLBACKS += ["ABORT", SQL("{}").format(SQL("ROLLBACK"))]
BREAKING = [swallow_integrity_error, mark_for_rollback, close_connection, *map(rolling_back, ROLLBACKS)]


@pytest.mark.parametrize("handler", BREAKING)
def test_a_handler_that_breaks_its_transaction_has_failed(
    order: Order, declare: Declare, handler: Callable[..., None]
) -> None:
    row = due(order, declare(Order, handler, name="breaks", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.attempts) == (PENDING, 1)
    [error] = row.errors
    assert error["error"] == "BrokenTransaction"
    assert "transaction" in error["message"] or "connection" in error["message"]
    assert not Effect.objects.exists()


def test_after_a_rollback_by_hand_no_other_statement_of_the_handler_is_executed(order: Order, declare: Declare) -> None:
    """It would be committed, or refused, without the mark on the row."""
    refused: list[str] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        rolling_back("ROLLBACK")(obj, timeout)
        try:
            Order.objects.count()
        except TransactionManagementError as error:
            refused.append(str(error))

    row = due(order, declare(Order, handler, name="continues", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.errors[0]["error"]) == (PENDING, "BrokenTransaction")
    assert len(refused) == 1


def test_a_swallowed_error_fails_the_attempt_only_where_it_ends_the_transaction(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, swallow_in_plain_sql, name="swallows", retry=dq.Retry([60])))
    fire(row)
    if connection.vendor == "postgresql":
        assert (state(row), row.errors[0]["error"]) == (PENDING, "BrokenTransaction")
        assert "no_such_column" in row.errors[0]["traceback"]
    else:
        assert state(row) == ("fired", "due")


def test_an_error_caught_around_an_atomic_block_is_no_failure(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Customer.objects.create(pk=1)
        try:
            with transaction.atomic():
                Customer.objects.create(pk=1)
        except IntegrityError:
            Effect.objects.create(what="caught", object_id="x")

    assert fire(due(order, declare(Order, handler, name="careful"))).fired
    assert Effect.objects.get().what == "caught"


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor == "mysql", reason="InnoDB checks foreign keys at once")
def test_a_constraint_that_fails_at_commit_fails_the_attempt(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Order.objects.filter(pk=obj.pk).update(customer_id=987654)

    row = due(order, declare(Order, handler, name="deferred", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.attempts) == (PENDING, 1)
    assert row.errors[0]["error"] == "IntegrityError"


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
    assert state(row) == ("fired", "due")
    assert ran == ["first", "last"]
    assert "on_commit" in caplog.text


def test_a_condition_that_the_database_refuses_counts_as_failed_attempts(order: Order, declare: Declare) -> None:
    """A column that a migration has yet to add must neither stop the worker nor be retried indefinitely unnoticed."""
    row = due(order, declare(Order, name="ahead", retry=dq.Retry([60])))
    object.__setattr__(dq.get_policy(row.policy), "when", Q(no_such_field=1))
    fire(row)
    assert (state(row), row.attempts, row.errors[0]["error"]) == (PENDING, 1, "FieldError")


def test_the_history_stays_small_however_often_it_fails(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(ValueError("x" * 100_000)), name="often", retry=dq.Retry([0] * 60)))
    for _ in range(60):
        fire(row)
    assert (state(row), row.attempts, len(row.errors)) == (PENDING, 60, 40)
    assert row.errors[-1]["attempt"] == 60
    make_due(row)
    fire(row)
    assert state(row) == ("dead", "retries")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


def test_an_error_that_cannot_be_told_is_recorded_all_the_same(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(Unspeakable()), name="unspeakable", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.attempts, row.errors[0]["error"]) == (PENDING, 1, "Unspeakable")


def test_a_snooze_beyond_all_calendars_is_a_failure(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(dq.Snooze(weeks=10_000)), name="centuries", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.attempts, row.errors[0]["error"]) == (PENDING, 1, "InvalidDelay")


def test_a_condition_that_failed_is_not_counted_against_a_row_that_was_moved_meanwhile(
    order: Order, declare: Declare
) -> None:
    policy = declare(Order, name="ahead", retry=dq.Retry([0]))
    row = due(order, policy)
    object.__setattr__(policy, "when", Q(no_such_field=1))
    move = functools.partial(dq.reschedule_timeout, row, hours=5)
    set_checkpoint_hook(lambda step: in_another_thread(move) if step == "undone" else None)
    report = fire(row)
    assert (state(row), row.attempts) == (PENDING, 0)
    assert report.again == {row.pk: row.run_at}
    assert row.run_at - timezone.now() > timedelta(hours=4)


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
