"""The transactions of handlers: which they break, which are those of coroutines, and which several timeouts share."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models import Q, QuerySet
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.ledger import outbox
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, state, work_of
from tests.integration.firing.handlers import Declare, Handler, Log, Patch, both, execute, raising, write
from tests.integration.firing.rows import FIRED, PENDING, hearing, logged, tried, written
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


# A statement that would end the transaction before the handler is refused


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


def test_a_task_that_is_not_awaited_is_named(order: Order, declare: Declare, caplog: Log) -> None:
    kept: list[asyncio.Task[None]] = []

    async def handler(obj: Order, timeout: Timeout) -> None:
        kept.append(asyncio.create_task(asyncio.sleep(3600)))
        await asyncio.create_task(asyncio.sleep(0))

    fire(due(order, declare(Order, handler, name="forgets")))
    [record] = logged(caplog, "tasks_unfinished")
    assert "testapp.order.forgets has returned before 1 task" in record.getMessage()
    assert kept[0].cancelled()


IN_ONE_TRANSACTION = pytest.mark.parametrize("option", ["batch", "together"])
checks_at_commit = pytest.mark.skipif(connection.vendor == "mysql", reason="InnoDB checks foreign keys at once")


def ids_of(timeouts: Any) -> list[int]:
    """Return the keys of the objects for which a handler was called."""
    return [int(row.object_id) for row in (timeouts if isinstance(timeouts, list) else [timeouts])]


def test_together_they_take_one_lock_one_mark_and_one_commit(orders: list[Order], declare: Declare) -> None:
    ran: list[int] = []
    policy = declare(Order, lambda order, _: ran.append(order.pk), name="shared", when=Q(status="unpaid"), together=20)
    rows = [due(order, policy) for order in reversed(orders)]
    work = work_of(*rows)
    with CaptureQueriesContext(connection) as queries:
        assert run(work, "default").fired == tuple(row.pk for row in rows)
    assert ran == [order.pk for order in reversed(orders)], "in due order"
    # MariaDB marks without waiting for a gap that others hold: SET STATEMENT ... FOR UPDATE ...
    words = [re.sub(r"^SET STATEMENT .*? FOR (?=UPDATE)", "", query["sql"]) for query in queries.captured_queries]
    ours = [sql for sql in words if sql.startswith(("SELECT", "UPDATE", "WITH")) and "id = -1" not in sql]
    at_once = can_mark_at_once(policy, "default")
    assert [sql.split()[0] for sql in ours] == (["WITH"] if at_once else ["SELECT", "SELECT", "UPDATE"])
    assert (words.count("COMMIT"), any("SAVEPOINT" in sql for sql in words)) == (1, False)
    assert {state(row) for row in rows} == {FIRED}


def test_a_batch_gets_a_queryset_of_locked_objects_and_their_timeouts_in_the_same_order(declare: Declare) -> None:
    calls: list[list[int]] = []

    def handler(queryset: QuerySet[Order], timeouts: list[Timeout]) -> None:
        calls.append([obj.pk for obj in queryset])
        assert ids_of(timeouts) == calls[-1]
        assert ({timeout.state for timeout in timeouts}, queryset.db) == ({"fired"}, "default")
        queryset.update(status="closed")

    policy = declare(Order, handler, name="closes", batch=3, when=Q(status="unpaid"))
    orders = [Order.objects.create() for _ in range(5)]
    rows = [due(order, policy) for order in reversed(orders)]
    paid = due(Order.objects.create(status="paid"), policy)
    works, _ = plan({row.pk: 1 for row in [*rows, paid]}, "default")
    assert [len(work.ids) for work in works] == [3, 3]
    fire(*rows, paid)
    assert calls == [[order.pk for order in orders[2:]], [order.pk for order in orders[:2]]]
    assert {state(row) for row in rows} == {FIRED}
    assert state(paid) == ("skipped", "condition")
    assert Order.objects.filter(status="closed").count() == 5


WAYS: dict[str, tuple[Handler, tuple[str, int]]] = {
    "an error": (raising(ValueError("no")), ("pending", 1)),
    "a skip": (raising(dq.Skip("no")), ("skipped", 1)),
    "a snooze": (raising(dq.Snooze(minutes=5)), ("pending", 0)),
    "giving up": (raising(dq.GiveUp("no")), ("dead", 1)),
    "an exit": (raising(SystemExit()), ("pending", 1)),
    "a broken transaction": (lambda *_: transaction.set_rollback(True), ("pending", 1)),
    "a commit that fails": (lambda *_: Order.objects.update(customer_id=987654), ("pending", 1)),
}


@IN_ONE_TRANSACTION
@pytest.mark.parametrize("way", WAYS)
def test_one_that_fails_affects_no_other(orders: list[Order], declare: Declare, way: str, option: Any) -> None:
    (act, expected), sizes, called = WAYS[way], list[int](), list[int]()

    def handler(target: Any, timeouts: Any) -> None:
        ids = ids_of(timeouts)
        sizes.append(len(ids))
        write(target, timeouts)
        transaction.on_commit(lambda: called.extend(ids))
        if orders[2].pk in ids:
            act(target, timeouts)

    policy = declare(Order, handler, name="one_fails", retry=dq.Retry([60]), **{option: 20})
    rows = [due(order, policy) for order in orders]
    with hearing(dq.timeout_fired) as heard:
        fire(*rows)
    bad = rows.pop(2)
    assert {tried(row) for row in rows} == {(FIRED, 1)}
    assert (state(bad)[0], bad.attempts) == expected
    assert written() == [row.object_id for row in rows] == [str(pk) for pk in called]
    assert [pk for _, pk in heard] == [row.pk for row in rows]
    assert option == "together" or sizes == [5, *[1] * 5], "then each is alone"


@checks_at_commit
def test_a_commit_that_failed_takes_its_changes_for_redis_along(
    orders: list[Order], declare: Declare, monkeypatch: Patch, redis_client: Any
) -> None:
    """A cancel that was rolled back would remove the entry of a pending timeout, which would then fire late."""
    waits, also = (dq.schedule_timeout(order, "remind", seconds=30) for order in orders[3:])
    sent: list[int] = []
    monkeypatch.setattr(outbox, "_send", lambda changes, using: sent.extend(change.id for change in changes))

    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk == orders[0].pk:
            dq.cancel_timeout(orders[3], "remind")
            obj.customer_id = 987654
            obj.save()
        else:
            dq.cancel_timeout(orders[4], "remind")

    policy = declare(Order, handler, name="at_commit", retry=dq.Retry([60]))
    works = [work_of(due(order, policy)) for order in orders[:2]]
    failed = run(works[0], "default")  # a thread keeps a report until it has the next one
    run(works[1], "default")
    assert failed.errors
    assert (state(waits)[0], state(also)[0]) == ("pending", "cancelled")
    assert also.pk in sent
    assert waits.pk not in sent


@IN_ONE_TRANSACTION
def test_what_handlers_change_arms_and_cancels_other_policies_in_the_transaction(declare: Declare, option: Any) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        if option == "batch":
            target.update(status="done", paid_at=timezone.now())
            return
        target.status, target.paid_at = "done", timezone.now()
        target.save()

    armed = declare(Order, name="armed", when=Q(status="done"), since="paid_at", after=timedelta(days=1))
    policy = declare(Order, handler, name="arms", **{option: 20})
    orders = [Order.objects.create(created_at=timezone.now()) for _ in range(3)]
    rows, steps, pending = [due(order, policy) for order in orders], list[str](), list[int]()

    def look(step: str) -> None:
        steps.append(step)
        pending.append(Timeout.objects.pending().count()) if step == "handled" else None

    set_checkpoint_hook(look)
    fire(*rows)
    assert (steps.count("begun"), pending[-1]) == (1, 3), "armed and cancelled before the commit"
    assert Timeout.objects.pending().of_labels([armed.label]).count() == 3
    assert Timeout.objects.filter(policy="testapp.order.cancel_unpaid", state="cancelled").count() == 3
