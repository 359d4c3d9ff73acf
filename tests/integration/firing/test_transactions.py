"""Transactions that a handler breaks, commits or rolls back by hand, and those of async handlers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.transaction import TransactionManagementError

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, state
from tests.integration.firing.handlers import Declare, Handler, Log, both, execute, write
from tests.integration.firing.rows import FIRED, PENDING, logged, tried, written
from tests.testapp.models import Customer, Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
HOURLY = dq.Retry([3600])


def swallow_integrity_error(obj: Order, timeout: Timeout) -> None:
    Customer.objects.create(pk=1)
    with contextlib.suppress(IntegrityError):
        Customer.objects.create(pk=1)


def continue_after_a_rollback(obj: Order, timeout: Timeout) -> None:
    """Its next statement would be committed, or refused, without the mark on the row."""
    execute("ROLLBACK")
    with pytest.raises(TransactionManagementError):
        Order.objects.count()


BREAKING: dict[str, Handler] = {
    "an error is swallowed": swallow_integrity_error,
    "it is marked": lambda *_: transaction.set_rollback(True),
    "its connection is closed": both(write, lambda *_: connection.close()),
    "it continues after a rollback": continue_after_a_rollback,
    "it is rolled back": both(write, lambda *_: execute("ROLLBACK")),
}


@pytest.mark.parametrize("handler", BREAKING.values(), ids=BREAKING)
def test_a_handler_that_breaks_its_transaction_has_failed(order: Order, declare: Declare, handler: Handler) -> None:
    row = due(order, declare(Order, handler, name="breaks", retry=HOURLY))
    fire(row)
    assert (tried(row), row.errors[0]["error"], written()) == ((PENDING, 1), "BrokenTransaction", [])
    assert "transaction" in row.errors[0]["message"] or "connection" in row.errors[0]["message"]


def test_a_swallowed_error_fails_the_attempt_only_where_it_ends_the_transaction(order: Order, declare: Declare) -> None:
    def swallow(obj: Order, timeout: Timeout) -> None:
        with contextlib.suppress(IntegrityError), transaction.atomic():  # which ends nothing anywhere
            Order.objects.create(pk=obj.pk)
        with contextlib.suppress(DatabaseError):
            execute("SELECT no_such_column FROM testapp_order")

    row = due(order, declare(Order, swallow, name="swallows", retry=HOURLY))
    fire(row)
    if connection.vendor == "postgresql":
        assert (state(row), row.errors[0]["error"]) == (PENDING, "BrokenTransaction")
        assert "no_such_column" in row.errors[0]["traceback"]
    else:
        assert state(row) == FIRED


def test_a_callback_on_commit_that_raises_undoes_nothing(order: Order, declare: Declare, caplog: Log) -> None:
    ran: list[str] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        transaction.on_commit(lambda: ran.append("first"))
        transaction.on_commit(lambda: 1 / 0)
        transaction.on_commit(lambda: ran.append("last"))

    row = due(order, declare(Order, handler, name="callbacks"))
    assert fire(row).fired == (row.pk,)
    assert (state(row), ran) == (FIRED, ["first", "last"])
    assert "on_commit" in caplog.text


# Transactions by hand: one that would end before the handler is refused, one outside is undone unless it was ended


COMMITS = ["COMMIT", "begin"]
DDL = [] if connection.features.can_rollback_ddl else ["CREATE TABLE delayq_new (id int)"]


@pytest.mark.parametrize("sql", [*COMMITS, *DDL])
@pytest.mark.parametrize("mode", ["alone", "batch"])
def test_a_statement_that_commits_is_refused(orders: list[Order], declare: Declare, sql: str, mode: str) -> None:
    """The timeouts would be fired for good, although the handler fails after that. See `effects_of` for all of them."""

    def handler(*_: Any) -> None:
        Effect.objects.create(what="half")
        execute(sql)
        raise ValueError("the second half")

    policy = declare(Order, handler, name="commits", retry=HOURLY, **MODES[mode])
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert {state(row)[0] for row in rows} == {"pending"}
    assert rows[0].errors[0]["error"] == "BrokenTransaction"
    assert "atomic=False" in rows[0].errors[0]["message"]
    assert not Effect.objects.exists()


# Async handlers run in the firing's own thread and connection, so that its transaction spans them


def test_an_async_handler_writes_in_the_transaction_of_its_firing(order: Order, declare: Declare) -> None:
    seen: list[Any] = []

    async def handler(obj: Order, timeout: Timeout) -> dq.Fired:
        await asyncio.sleep(0)
        obj.status = "cancelled"
        await obj.asave()
        await dq.aschedule_timeout(obj, "remind", minutes=5)
        seen.append(await sync_to_async(lambda: (threading.get_ident(), id(connection.connection)))())
        seen.append(await sync_to_async(lambda: connection.in_atomic_block)())
        if connection.vendor != "sqlite":
            seen.append(in_another_thread(Timeout.objects.filter(policy="testapp.order.remind").count))
        return dq.Fired("reminded first")

    row = due(order, declare(Order, handler, name="asynchronous"))
    assert fire(row).fired == (row.pk,)
    assert seen[:2] == [(threading.get_ident(), id(connection.connection)), True]
    assert seen[2:] in ([], [0]), "no other connection saw it before the commit"
    assert (state(row), row.reason, Order.objects.get().status) == (FIRED, "reminded first", "cancelled")
    assert Timeout.objects.pending().get().policy == "testapp.order.remind"


def test_async_handlers_run_in_each_mode_and_are_undone(orders: list[Order], declare: Declare) -> None:
    async def one(obj: Order, timeout: Timeout) -> None:
        await Effect.objects.acreate(what="one", object_id=obj.pk)

    async def many(queryset: Any, timeouts: list[Timeout]) -> None:
        await Effect.objects.acreate(what=f"{await queryset.acount()}", object_id="x")

    async def cancelled(obj: Order, timeout: Timeout) -> None:
        await one(obj, timeout)
        raise asyncio.CancelledError

    for number, (handler, options) in enumerate(
        [(one, {"together": 10}), (many, {"batch": 10}), (one, {"atomic": False}), (cancelled, {})]
    ):
        policy = declare(Order, handler, name=f"async_{number}", retry=dq.Retry.never(), **options)
        fire(*[due(order, policy) for order in orders])
    assert Counter(Effect.objects.values_list("what", flat=True)) == {"one": 10, "5": 1}
    assert Counter(Timeout.objects.values_list("state", flat=True)) == {"fired": 15, "dead": 5}


def test_a_task_that_is_not_awaited_is_named(order: Order, declare: Declare, caplog: Log) -> None:
    kept: list[asyncio.Task[None]] = []

    async def handler(obj: Order, timeout: Timeout) -> None:
        kept.append(asyncio.create_task(asyncio.sleep(3600)))
        await asyncio.create_task(asyncio.sleep(0))

    fire(due(order, declare(Order, handler, name="forgets")))
    [record] = logged(caplog, "tasks_unfinished")
    assert "testapp.order.forgets has returned before 1 task" in record.getMessage()
    assert kept[0].cancelled()
