"""A firing waits for no lock: a locked timeout is released for a short while, and no attempt is counted."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import run
from django_delayq.models import Timeout
from tests.integration.firing.conftest import (
    FIRED,
    UNTRIED,
    WAIT,
    Declare,
    another_session,
    due,
    execute,
    fire,
    in_another_thread,
    locking,
    make_due,
    needs_row_locks,
    once_at,
    state,
    tried,
    work_of,
)
from tests.support.waiting import wait_until
from tests.testapp.models import Customer, Effect, ExpressOrder, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
SOON = timedelta(seconds=1)


@needs_row_locks
@pytest.mark.parametrize("ahead", [timedelta(minutes=10), timedelta(minutes=-10)], ids=["ahead", "behind"])
@pytest.mark.parametrize("locked", ["object", "row"])
def test_a_locked_timeout_waits_by_the_database_clock_if_that_of_the_process_is_wrong(
    order: Order, monkeypatch: pytest.MonkeyPatch, locked: str, ahead: timedelta
) -> None:
    row, now = due(order), timezone.now
    with locking(order if locked == "object" else row), monkeypatch.context() as patch:
        patch.setattr(timezone, "now", lambda: now() + ahead)
        report = run(work_of(row), "default")
    assert report.now is not None
    assert now() - SOON < report.now < now() + SOON, "the worker estimates the database clock by this"
    assert now() - SOON < report.again[row.pk] < now() + SOON


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
def test_the_wait_grows_from_look_to_look_and_begins_anew_after_a_firing(order: Order) -> None:
    def wait() -> float:
        before = timezone.now()
        return (fire(row).again[row.pk] - before).total_seconds()

    row = due(order)
    with locking(order):
        shortest = min(wait() for _ in range(2))
        longest = max(wait() for _ in range(8))
    assert longest >= 2.5 > shortest
    fire(row)
    row = due(order)
    with locking(order):
        fire(row)
        assert fire(row).again[row.pk] - timezone.now() < timedelta(seconds=2.5)


@needs_row_locks
def test_a_payment_that_commits_while_it_holds_the_row_wins(order: Order) -> None:
    row = due(order, "cancel_unpaid")

    def pay() -> None:
        locked = Order.objects.select_for_update().get(pk=order.pk)
        Order.objects.filter(pk=locked.pk).update(status="paid")

    with another_session(pay):
        assert set(fire(row).again) == {row.pk}
    fire(row)
    assert state(row) == ("skipped", "condition")


@needs_row_locks
def test_a_payment_that_comes_while_a_firing_holds_the_row_learns_that_it_is_too_late(order: Order) -> None:
    row, answers = due(order, "cancel_unpaid"), list[bool]()
    payment = threading.Thread(
        target=lambda: answers.append(in_another_thread(lambda: dq.cancel_timeout(order, "cancel_unpaid")))
    )
    once_at("marked", payment.start)
    fire(row)
    payment.join(WAIT)
    assert (answers, state(row)) == ([False], FIRED)


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


@pytest.mark.skipif(connection.vendor != "sqlite", reason="SQLite holds the whole database")
def test_on_sqlite_a_busy_database_puts_back(order: Order) -> None:
    row = due(order)
    execute("PRAGMA busy_timeout = 50")
    try:
        with another_session(lambda: Order.objects.update(note="x")):
            assert set(fire(row).again) == {row.pk}
    finally:
        connection.close()
    assert tried(row) == UNTRIED
    assert fire(row).fired


@needs_row_locks
def test_a_deadlock_is_nobodys_fault_and_the_loser_comes_again(declare: Declare) -> None:
    mine, other = Order.objects.create(), Order.objects.create()
    turn = threading.Barrier(2, timeout=WAIT)

    def handler(obj: Order, timeout: Timeout) -> None:
        if connection.vendor == "postgresql":  # be the one who notices
            execute("SET LOCAL deadlock_timeout = '50ms'")
        else:  # InnoDB ends the transaction that has changed less
            Effect.objects.all().count()
        turn.wait()
        Order.objects.select_for_update().get(pk=other.pk)
        Effect.objects.create(what="done", object_id=obj.pk)

    def opponent() -> None:
        with transaction.atomic():
            Order.objects.filter(pk=other.pk).update(note="x")
            Effect.objects.bulk_create([Effect(what="heavy", object_id="x") for _ in range(50)])
            turn.wait()
            Order.objects.filter(pk=mine.pk).update(note="x")

    row = due(mine, declare(Order, handler, name="deadlocked"))
    thread = threading.Thread(target=lambda: in_another_thread(opponent))
    thread.start()
    report = fire(row)
    thread.join(WAIT)
    assert set(report.again) == {row.pk}
    assert (tried(row), row.history) == (UNTRIED, [])
    turn = threading.Barrier(1)
    make_due(row)
    assert fire(row).fired == (row.pk,)
    assert Effect.objects.filter(what="done").count() == 1


@pytest.mark.skipif(connection.vendor != "postgresql", reason="isolation levels as PostgreSQL has them")
def test_a_serialization_failure_counts_no_attempt(order: Order, declare: Declare) -> None:
    statement = "DO $$ BEGIN RAISE EXCEPTION 'could not serialize' USING ERRCODE = '40001'; END $$"
    row = due(order, declare(Order, lambda obj, timeout: execute(statement), name="unserializable"))
    assert set(fire(row).again) == {row.pk}
    assert tried(row) == UNTRIED


@needs_row_locks
def test_a_handler_that_waits_too_long_for_a_lock_counts_no_attempt(declare: Declare) -> None:
    mine, other = Order.objects.create(), Order.objects.create()

    def handler(obj: Order, timeout: Timeout) -> None:
        local = "SET LOCAL lock_timeout = '50ms'"
        execute(local if connection.vendor == "postgresql" else "SET SESSION innodb_lock_wait_timeout = 1")
        Order.objects.select_for_update().get(pk=other.pk)

    row = due(mine, declare(Order, handler, name="impatient"))
    with locking(other):
        assert set(fire(row).again) == {row.pk}
    assert tried(row) == UNTRIED
    assert fire(row).fired


@pytest.mark.skipif(connection.vendor != "mysql", reason="other databases count keys without a lock")
def test_a_handler_that_waits_too_long_for_the_next_key_counts_no_attempt(order: Order, declare: Declare) -> None:
    """An INSERT of rows of a query holds the counter of keys of its table. Deadlocks at it have the same error."""
    Order.objects.create()
    table = Effect._meta.db_table

    def insert_slowly() -> None:
        with transaction.atomic(), connection.cursor() as cursor:  # the second row waits
            columns = f"INSERT INTO {table} (what, object_id, at, idempotency_key)"
            name = "IF(id = %s, 'delayq free', 'delayq held')"
            cursor.execute(f"{columns} SELECT 'x', id, now(), GET_LOCK({name}, 60) FROM testapp_order", [order.pk])

    def handler(obj: Order, timeout: Timeout) -> None:
        with connection.cursor() as cursor:  # a setting of the session would cost the connection, which holds a lock
            values = f"INSERT INTO {table} (what, object_id, at, idempotency_key) VALUES ('y', %s, now(), '')"
            cursor.execute(f"SET STATEMENT innodb_lock_wait_timeout = 1 FOR {values}", [obj.pk])

    row = due(order, declare(Order, handler, name="impatient"))
    with connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('delayq held', 0)")
        slow = threading.Thread(target=lambda: in_another_thread(insert_slowly))
        slow.start()
        waits = "SELECT count(*) FROM information_schema.processlist WHERE state = 'User lock' AND db = DATABASE()"
        wait_until(lambda: cursor.execute(waits) and cursor.fetchone() == (1,), "the other session waits")
        report = fire(row)
        cursor.execute("SELECT RELEASE_LOCK('delayq held')")
    slow.join(WAIT)
    assert set(report.again) == {row.pk}
    assert tried(row) == UNTRIED
    assert fire(row).fired


@needs_row_locks
def test_a_deadlock_that_the_handler_swallowed_still_undoes_everything(declare: Declare) -> None:
    """On MySQL it has rolled back the mark too: what the handler writes afterwards must not be committed alone."""
    order = Order.objects.create()
    swallowed: list[str] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        try:
            provoke_deadlock()
        except Exception as error:
            swallowed.append(str(error))
        if connection.vendor == "mysql":
            Effect.objects.create(what="after", object_id=obj.pk)

    def provoke_deadlock() -> None:
        if connection.vendor == "postgresql":
            execute("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$")
        turn = threading.Barrier(2, timeout=WAIT)

        def opponent() -> None:
            with transaction.atomic():
                Effect.objects.bulk_create([Effect(what="heavy", object_id="x") for _ in range(50)])
                Order.objects.select_for_update().get(pk=other.pk)
                turn.wait()
                Order.objects.filter(pk=order.pk).update(note="x")

        thread = threading.Thread(target=lambda: in_another_thread(opponent))
        thread.start()
        turn.wait()
        try:
            Order.objects.select_for_update().get(pk=other.pk)
        finally:
            thread.join(WAIT)

    other = Order.objects.create()
    row = due(order, declare(Order, handler, name="swallows"))
    assert set(fire(row).again) == {row.pk}
    assert len(swallowed) == 1
    assert tried(row) == UNTRIED
    assert not Effect.objects.filter(what="after").exists()
