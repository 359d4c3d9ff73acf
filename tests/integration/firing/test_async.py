"""Async handlers run in the firing's own thread and connection, so that its transaction spans them."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import PENDING, Declare, due, fire, in_another_thread, logged, state, tried
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def test_an_async_handler_writes_in_the_transaction_of_its_firing(order: Order, declare: Declare) -> None:
    seen: list[Any] = []

    async def handler(obj: Order, timeout: Timeout) -> None:
        await asyncio.sleep(0)
        obj.status = "cancelled"
        await obj.asave()
        await Effect.objects.acreate(what="async", object_id=obj.pk)
        seen.append(await sync_to_async(lambda: (threading.get_ident(), id(connection.connection)))())
        seen.append(await sync_to_async(lambda: connection.in_atomic_block)())
        if connection.vendor != "sqlite":
            seen.append(in_another_thread(Effect.objects.count))

    row = due(order, declare(Order, handler, name="asynchronous"))
    assert fire(row).fired == (row.pk,)
    assert seen[:2] == [(threading.get_ident(), id(connection.connection)), True]
    assert seen[2:] in ([], [0]), "no other connection saw it before the commit"
    assert Effect.objects.count() == 1
    assert Order.objects.get().status == "cancelled"


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError(), SystemExit(1)])
def test_what_a_failing_cancelled_or_exiting_async_handler_wrote_is_undone(
    order: Order, declare: Declare, error: BaseException
) -> None:
    async def handler(obj: Order, timeout: Timeout) -> None:
        obj.status = "cancelled"
        await obj.asave()
        await Effect.objects.acreate(what="async", object_id=obj.pk)
        raise error

    row = due(order, declare(Order, handler, name="async_ends", retry=dq.Retry([60])))
    fire(row)
    assert (tried(row), row.errors[0]["error"]) == ((PENDING, 1), type(error).__name__)
    assert not Effect.objects.exists()
    assert Order.objects.get().status == "unpaid"


def test_an_async_handler_schedules_with_the_async_twins_and_returns_an_outcome(order: Order, declare: Declare) -> None:
    async def handler(obj: Order, timeout: Timeout) -> dq.Skip:
        await dq.aschedule_timeout(obj, "remind", minutes=5)
        return dq.Skip("reminded first")

    row = due(order, declare(Order, handler, name="async_schedules"))
    fire(row)
    assert (state(row), row.reason) == (("skipped", "handler"), "reminded first")
    assert Timeout.objects.pending().get().policy == "testapp.order.remind"


def test_async_handlers_are_grouped_batched_and_run_outside_too(orders: list[Order], declare: Declare) -> None:
    async def one(obj: Order, timeout: Timeout) -> None:
        await Effect.objects.acreate(what="one", object_id=obj.pk)

    async def many(queryset: Any, timeouts: list[Timeout]) -> None:
        await Effect.objects.acreate(what=f"{await queryset.acount()}", object_id="x")

    class Sender:
        async def __call__(self, obj: Order, timeout: Timeout) -> None:
            await Effect.objects.acreate(what="outside", object_id=obj.pk)

    policies = [
        declare(Order, one, name="async_group", together=10),
        declare(Order, many, name="async_batch", batch=10),
        declare(Order, functools.partial(one), name="async_partial"),
        declare(Order, Sender(), name="async_outside", atomic=False),
    ]
    for policy in policies:
        fire(*[due(order, policy) for order in orders])
    assert set(Timeout.objects.values_list("state", flat=True)) == {"fired"}
    counted = {what: Effect.objects.filter(what=what).count() for what in ("one", "5", "outside")}
    assert counted == {"one": 10, "5": 1, "outside": 5}


def test_a_task_that_is_not_awaited_is_named(order: Order, declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    kept: list[asyncio.Task[None]] = []

    async def handler(obj: Order, timeout: Timeout) -> None:
        kept.append(asyncio.create_task(asyncio.sleep(3600)))
        await asyncio.create_task(asyncio.sleep(0))

    fire(due(order, declare(Order, handler, name="forgets")))
    [record] = logged(caplog, "tasks_unfinished")
    assert "testapp.order.forgets has returned before 1 task" in record.getMessage()
    assert kept[0].cancelled()
