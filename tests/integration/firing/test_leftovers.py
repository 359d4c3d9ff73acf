"""Whatever a handler leaves behind in its thread, the next timeouts of that thread are right.

The table: the leftovers, times the places where the code runs. Each runs in a real worker with one thread, which then
fires six timeouts of others. A timeout may count as fired only if another connection sees its work.
"""

from __future__ import annotations

import contextvars
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection, connections, transaction
from django.utils import timezone, translation

import django_delayq as dq
from django_delayq.conf import ConfigError
from django_delayq.contrib import remote
from django_delayq.firing import Report, Work, run
from django_delayq.firing.executors import make_executor
from django_delayq.ledger.db_connections import check_connections
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine
from tests.integration.firing.conftest import fire
from tests.integration.firing.handlers import Log, Patch, execute, raising
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, needs_more_connections
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True), needs_more_connections]
TENANT = contextvars.ContextVar("tenant", default="none")
SETTINGS = {
    "postgresql": [
        "SET TIME ZONE 'Asia/Tokyo'",
        "SET search_path TO nowhere",
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "DO $$ BEGIN PERFORM set_config('TimeZone', 'Asia/Tokyo', false); END $$",
    ],
    "mysql": [
        "SET time_zone = '+09:00'",
        "SET SESSION TRANSACTION READ ONLY",
        "USE information_schema",
    ],
    "sqlite": ["PRAGMA query_only = 1", "ATTACH ':memory:' AS elsewhere"],
}[connection.vendor]


def write(using: str = "default") -> None:
    Effect.objects.using(using).create(what="left", object_id="1")


def driver() -> Any:
    connection.ensure_connection()
    return connection.connection


def off() -> None:
    transaction.set_autocommit(False)
    write()


def begin() -> None:
    execute("BEGIN")
    write()


def enter(using: str = "default", sql: str = "") -> None:
    transaction.atomic(using=using).__enter__()
    with suppress(DatabaseError):
        connections[using].cursor().execute(sql) if sql else write(using)


def switch() -> None:
    connections["default"] = connections.create_connection("default")


def change_the_driver() -> None:
    changed = driver()
    if connection.vendor == "postgresql":
        from psycopg.rows import dict_row

        changed.row_factory = dict_row
        if not connection.in_atomic_block:
            changed.read_only = True
    elif connection.vendor == "sqlite":
        changed.row_factory = sqlite3.Row
        changed.text_factory = bytes
    else:
        changed.autocommit(False)


def localize() -> None:
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    TENANT.set("another")


LEFT: dict[str, Callable[[], object]] = {
    "autocommit off": off,
    "BEGIN": begin,
    "atomic()": enter,
    "atomic() elsewhere": lambda: enter("second"),
    "atomic() with an error": lambda: enter(sql="SELECT nothing FROM nowhere"),
    "COMMIT of the driver": lambda: driver().commit(),
    "broken": lambda: driver().close(),
    "switched": switch,
    "settings of the driver": change_the_driver,
    "an execute wrapper": lambda: connection.execute_wrapper(raising(RuntimeError())).__enter__(),
    "language, zone, variable": localize,
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    **{statement: partial(execute, statement) for statement in SETTINGS},
}
PLACES: dict[str, dict[str, Any]] = {
    "atomic": {},
    "outside": {"atomic": False},
    "batch": {"batch": 5},
    "async": {},
    "limit": {"limits": dq.Limits(run=timedelta(seconds=30))},
    "callback": {},
}


@pytest.fixture
def with_second(monkeypatch: Patch) -> Iterator[None]:
    """Let the alias `second` lead to the same database."""
    connections["default"].ensure_connection()
    monkeypatch.setitem(connections.settings, "second", connections["default"].settings_dict)
    yield
    connections["second"].close()
    if getattr(connections["second"], "pool", None) is not None:
        connections["second"].close_pool()  # type: ignore[attr-defined]
    del connections["second"]


@pytest.fixture
def worker(with_second: None, redis_client: Any) -> Iterator[RunningWorker]:
    running = RunningWorker(concurrency=1)
    yield running
    running.stop()
    forget_engine()


def make(place: str, leave: Callable[[], object]) -> Callable[..., Any]:
    """Return a handler that does its work, and the first time leaves something behind and works on."""
    called: list[bool] = []

    def work(order: Order) -> None:
        Order.objects.filter(pk=order.pk).update(status="done")
        if place == "callback":
            transaction.on_commit(lambda: then(order))
        else:
            then(order)

    def then(order: Order) -> None:
        before, was_inside = (connections["default"], connection.connection), connection.in_atomic_block
        if not called:
            called.append(True)
            leave()
            if was_inside and (connections["default"], connection.connection) != before:
                return  # the work on another connection is its own, and on SQLite would wait for the first one
        Effect.objects.create(what="then", object_id=order.pk)

    async def awork(order: Order, timeout: Timeout) -> None:
        await sync_to_async(work)(order)

    if place == "async":
        return awork
    if place == "batch":
        return lambda orders, timeouts: [*map(work, orders)]
    return lambda order, timeout: work(order)


def innocent(order: Order, timeout: Timeout) -> None:
    order.status = "done"
    order.note = f"{translation.get_language()} {timezone.get_current_timezone_name()} {TENANT.get()}"
    order.save()


def settled(rows: list[Timeout]) -> Callable[[], bool]:
    return lambda: not Timeout.objects.filter(pk__in=[row.pk for row in rows], settled_at=None).exists()


def fire_row(row: Timeout) -> Report:
    """Run a work of this row, as an executor does, without a plan before."""
    return run(Work(row.policy, (row.pk,), (row.object_id,)), "default")


def due(policy: Any) -> Timeout:
    return dq.schedule_timeout(Order.objects.create(status="new"), policy, seconds=0)


@pytest.mark.parametrize("left", LEFT)
def test_the_next_timeouts_of_the_thread_are_right(left: str, worker: RunningWorker, declare: Any, caplog: Log) -> None:
    if os.environ.get("DELAYQ_TEST_POOLER") and left in SETTINGS:
        pytest.skip("PgBouncer in transaction mode passes the settings of a session on to others")
    before = f"{translation.get_language()} {timezone.get_default_timezone_name()} {TENANT.get()}"
    inside = declare(Order, innocent, name="inside")
    outside = declare(Order, innocent, name="outside", atomic=False)
    # Every third place, in turn: with all of them the table takes a minute on each database.
    for place, options in list(PLACES.items())[list(LEFT).index(left) % 3 :: 3]:
        name = f"left_{place.replace(' ', '_')}"
        culprit = declare(Order, make(place, LEFT[left]), name=name, retry=dq.Retry.never(), **options)
        row = due(culprit)
        wait_until(settled([row]), f"{place}: the culprit is settled", 20)
        others = [due(policy) for policy in (inside, outside) for _ in range(3)]
        wait_until(settled(others), f"{place}: the others are settled", 20)
        row.refresh_from_db()
        status = Order.objects.get(pk=row.object_id).status
        worked_on = Effect.objects.filter(what="then", object_id=row.object_id).exists()
        if row.state == "fired":
            assert status == "done", place
            assert worked_on or left == "COMMIT of the driver" or place == "callback", place
            assert place != "callback" or worked_on or "An on_commit() callback" in caplog.text
        elif options.get("atomic", True) and left != "COMMIT of the driver":
            assert (status, worked_on) == ("new", False), place
        states = Timeout.objects.filter(pk__in=[each.pk for each in others]).values_list("state", flat=True)
        assert set(states) == {"fired"}, place
        orders = Order.objects.filter(pk__in=[each.object_id for each in others])
        assert set(orders.values_list("status", "note")) == {("done", before)}, place
        with transaction.atomic():  # nothing is locked
            list(orders.select_for_update(nowait=connection.features.has_select_for_update_nowait))
            orders.update(note="")
        caplog.clear()


def test_a_handler_does_not_inherit_the_session_of_another_one_in_its_transaction(declare: Any) -> None:
    seen: list[int] = []

    def handler(order: Order, timeout: Timeout) -> None:
        if len(seen) == 1:
            execute(SETTINGS[0])
        seen.append(order.pk)

    policy = declare(Order, handler, name="shared", together=20)
    rows = [due(policy) for _ in range(4)]
    assert len(fire(*rows).fired) == 4
    assert len(seen) == 2 + 4, "all were rolled back, and each was fired alone"


def test_a_message_is_refused_in_a_transaction_that_others_may_never_commit() -> None:
    row = due("remind")
    message = {"policy": "testapp.order.remind", "ids": [row.pk], "suspect": False, "using": "default"}
    with transaction.atomic(), pytest.raises(RuntimeError, match="would count as fired without a COMMIT"):
        remote.fire(message)
    remote.fire(message)
    row.refresh_from_db()
    assert row.state == "fired"


def test_nothing_fires_on_a_database_without_autocommit(monkeypatch: Patch) -> None:
    """There Django's `atomic()` commits nothing, without an error."""
    row = due("remind")
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    with pytest.raises(ConfigError, match=r"DATABASES\['default'\]\['AUTOCOMMIT'\] is False"):
        make_executor("default", 1)
    assert fire_row(row).fired == ()
    monkeypatch.undo()
    row.refresh_from_db()
    assert (row.state, row.attempts) == ("pending", 0)


def test_debug_keeps_no_statements_of_works_that_have_ended(settings: Any) -> None:
    settings.DEBUG = True
    row = due("remind")
    assert connection.queries_log
    fire_row(row)
    check_connections()
    assert not connection.queries_log
