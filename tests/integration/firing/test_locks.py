"""A firing waits for no lock: a locked timeout is released for a short while, and no attempt is counted."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.utils import timezone

from django_delayq.models import Timeout
from tests.e2e.races.sessions import Session, needs_row_locks, transaction_with
from tests.integration.firing.conftest import due, fire, in_another_thread, locking, make_due, state
from tests.integration.firing.handlers import WAIT, Declare, execute
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


@pytest.mark.skipif(connection.vendor != "sqlite", reason="SQLite holds the whole database")
def test_on_sqlite_a_busy_database_puts_back(order: Order) -> None:
    row = due(order)
    execute("PRAGMA busy_timeout = 50")
    try:
        with transaction_with(lambda: Order.objects.update(note="x")):
            assert set(fire(row).again) == {row.pk}
    finally:
        connection.close()
    assert tried(row) == UNTRIED
    assert fire(row).fired


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
