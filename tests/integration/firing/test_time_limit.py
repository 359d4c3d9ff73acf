"""A handler that takes longer than its limit is abandoned: rolled back, recorded, retried, in every mode."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import DatabaseError, connection, transaction

import django_delayq as dq
from django_delayq import signals
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.integration.firing.conftest import (
    ATOMIC_OR_NOT,
    LIMITED_MODES,
    MODES,
    UNTRIED,
    WAIT,
    Declare,
    another_session,
    due,
    execute,
    fire,
    logged,
    make_due,
    needs_row_locks,
    receiving,
    state,
    tried,
)
from tests.integration.firing.limits import FAILED, LIMIT, LIMITS, RETRY, compute, overrun, sleep, threads_end
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """A server that accepts connections and never answers, until the test ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def wait_for_answer(silent_server: socket.socket) -> Iterator[Callable[[], None]]:
    """Call it in a handler: it returns when the test ends."""
    clients: list[socket.socket] = []

    def wait() -> None:
        client = socket.create_connection(silent_server.getsockname())
        clients.append(client)
        client.recv(1)

    yield wait
    for client in clients:
        client.shutdown(socket.SHUT_RDWR)
    threads_end()
    for client in clients:
        client.close()


@pytest.fixture
def one_connection(transactional_db: None) -> Iterator[None]:
    """Use an account that may open one connection."""
    settings, name = connection.settings_dict, connection.ops.quote_name(connection.settings_dict["NAME"])
    owner, account = settings["USER"], f"limited_{os.getpid()}@'127.0.0.1'"
    execute(f"CREATE USER {account} WITH MAX_USER_CONNECTIONS 1")
    execute(f"GRANT ALL ON {name}.* TO {account}")
    connection.close()
    settings["USER"] = account.partition("@")[0]
    yield
    connection.close()
    settings["USER"] = owner
    execute(f"DROP USER {account}")


def is_free(order: Order) -> bool:
    """Return whether no transaction holds the row of `order`, or with SQLite the database."""
    try:
        with transaction.atomic():
            Order.objects.select_for_update(nowait=connection.features.has_select_for_update_nowait).get(pk=order.pk)
            Order.objects.filter(pk=order.pk).update(note="free")
    except DatabaseError:
        return False
    return True


@LIMITED_MODES
@pytest.mark.parametrize("act", [sleep, compute], ids=lambda act: act.__name__)
def test_a_handler_that_takes_too_long_is_rolled_back_and_retried(
    order: Order, declare: Declare, act: Callable[[], None], mode: str
) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        with transaction.atomic():
            Order.objects.filter(pk=order.pk).update(status="half done")
            act()

    row = due(order, declare(Order, handler, name="hangs", limits=LIMITS, retry=RETRY, **MODES[mode]))
    report = fire(row)
    assert (overrun(row), list(report.again)) == (FAILED, [row.pk])
    order.refresh_from_db()
    assert order.status == "unpaid"
    assert is_free(order)
    threads_end()


@LIMITED_MODES
def test_a_handler_whose_socket_never_answers_ends_as_dead_and_holds_no_lock(
    order: Order, declare: Declare, wait_for_answer: Callable[[], None], mode: str
) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        Order.objects.filter(pk=order.pk).update(status="half done")
        wait_for_answer()

    row = due(order, declare(Order, handler, name="asks", limits=LIMITS, retry=dq.Retry([0, 0]), **MODES[mode]))
    for attempt in (1, 2, 3):
        make_due(row)
        fire(row)
        assert overrun(row) == ("dead" if attempt == 3 else "pending", attempt, "TimeLimitExceeded")
        assert is_free(order)
    assert "test_time_limit.py" in row.errors[-1]["message"], "the error names the place"
    assert firing_state.stuck_threads == 3


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor != "mysql", reason="of MySQL and MariaDB, where another connection cuts one")
@pytest.mark.usefixtures("one_connection")
def test_a_handler_is_cut_off_although_its_account_may_open_no_other_connection(
    order: Order, declare: Declare, wait_for_answer: Callable[[], None]
) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        order.save()
        wait_for_answer()

    row = due(order, declare(Order, handler, name="asks", limits=LIMITS, retry=RETRY))
    fire(row)
    assert overrun(row) == FAILED
    assert is_free(order)


@needs_row_locks
@pytest.mark.dialect
def test_a_handler_that_waits_for_a_lock_is_abandoned(orders: list[Order], declare: Declare) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        order.save()
        Order.objects.filter(pk=orders[1].pk).update(note="waited")

    row = due(orders[0], declare(Order, handler, name="waits", limits=LIMITS, retry=RETRY))
    with another_session(lambda: Order.objects.filter(pk=orders[1].pk).update(note="locked")):
        fire(row)
        assert overrun(row) == FAILED
        assert is_free(orders[0])
    assert is_free(orders[1])
    threads_end()


@ATOMIC_OR_NOT
def test_a_coroutine_is_cancelled_and_may_clean_up(order: Order, declare: Declare, atomic: bool) -> None:
    seen: list[str] = []

    async def handler(order: Order, timeout: Timeout) -> None:
        try:
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    row = due(order, declare(Order, handler, name="awaits", limits=LIMITS, retry=RETRY, atomic=atomic))
    fire(row)
    assert (overrun(row), seen) == (FAILED, ["cancelled"])
    threads_end()


def test_a_coroutine_that_blocks_its_event_loop_is_interrupted(order: Order, declare: Declare) -> None:
    async def handler(order: Order, timeout: Timeout) -> None:
        compute()

    row = due(order, declare(Order, handler, name="blocks", limits=LIMITS, retry=RETRY))
    fire(row)
    assert overrun(row) == FAILED
    threads_end()


def test_of_a_shared_transaction_only_the_timeout_whose_handler_hangs_is_charged(
    orders: list[Order], declare: Declare
) -> None:
    calls: list[int] = []
    heard: list[int] = []

    def handler(order: Order, timeout: Timeout) -> None:
        calls.append(order.pk)
        if len(calls) == 2:
            raise ValueError  # from here on each is alone, and some have fired before one hangs
        if order.pk == orders[3].pk:
            sleep()

    def hear(sender: object, timeout: Timeout, **_: object) -> None:
        heard.append(timeout.pk)

    policy = declare(Order, handler, name="one_by_one", limits=LIMITS, retry=RETRY, together=20)
    rows = [due(order, policy) for order in orders]
    with receiving(hear, signals.timeout_fired):
        report = fire(*rows)
    assert overrun(rows.pop(3)) == FAILED
    assert set(report.fired) == {row.pk for row in rows} == set(heard)
    assert [tried(row) for row in rows] == [(("fired", "due"), 1)] * 4


def test_a_batch_that_hangs_is_fired_one_by_one(orders: list[Order], declare: Declare) -> None:
    sizes: list[int] = []

    def handler(objects: Any, timeouts: list[Timeout]) -> None:
        sizes.append(len(timeouts))
        if orders[1].pk in {int(row.object_id) for row in timeouts}:
            sleep()

    policy = declare(Order, handler, name="many", batch=5, limits=LIMITS, retry=RETRY)
    rows = [due(order, policy) for order in orders]
    report = fire(*rows)
    assert (sizes, overrun(rows[1])) == ([5, 1, 1, 1, 1, 1], FAILED)
    assert (len(report.fired), list(report.again)) == (4, [rows[1].pk])


def test_the_timeouts_of_a_callback_that_hangs_are_fired_and_the_callbacks_behind_it_run(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def send(order: Order) -> None:
        if order.pk == orders[1].pk:
            sleep()
        called.append(order.pk)

    def handler(order: Order, timeout: Timeout) -> None:
        transaction.on_commit(lambda: send(order))

    policy = declare(Order, handler, name="sends", limits=LIMITS, together=20)
    rows = [due(order, policy) for order in orders]
    assert set(fire(*rows).fired) == {row.pk for row in rows}
    assert {state(row) for row in rows} == {("fired", "due")}
    assert called == [order.pk for order in orders if order.pk != orders[1].pk]
    [record] = logged(caplog, "callback_abandoned")
    assert "its transaction is committed" in record.getMessage()


def test_the_setting_is_the_limit_of_policies_that_declare_none(
    orders: list[Order], declare: Declare, settings: Settings
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HANDLER_LIMIT": LIMIT}
    quick, slow = threading.Event(), threading.Event()
    rows = [
        due(orders[0], declare(Order, lambda *_: quick.wait(WAIT), name="default", retry=RETRY)),
        due(orders[1], declare(Order, lambda *_: slow.wait(0.5), name="own", limits=dq.Limits(run=100 * LIMIT))),
    ]
    fire(rows[0])
    quick.set()
    assert overrun(rows[0]) == FAILED
    assert fire(rows[1]).fired == (rows[1].pk,)


def test_a_policy_without_a_limit_runs_in_the_thread_of_the_caller(orders: list[Order], declare: Declare) -> None:
    threads: list[int] = []

    def handler(order: Order, timeout: Timeout) -> None:
        threads.append(threading.get_ident())

    for order, limits in zip(orders, [None, dq.Limits(), LIMITS], strict=False):
        fire(due(order, declare(Order, handler, name=f"p{order.pk}", limits=limits)))
    assert [thread == threading.get_ident() for thread in threads] == [True, True, False]
    assert connection.allow_thread_sharing is False


@pytest.mark.parametrize("limits", [None, LIMITS], ids=["without", "limited"])
def test_an_error_outside_of_handlers_releases_the_work_with_and_without_a_limit(
    order: Order, declare: Declare, limits: dq.Limits | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    row = due(order, declare(Order, lambda *_: None, name="works", limits=limits))
    monkeypatch.setattr("django_delayq.firing.rails.room", lambda *_: 1 / 0)
    report = fire(row)
    assert list(report.again) == [row.pk]
    assert tried(row) == UNTRIED
    [record] = logged(caplog, "timeouts_released")
    assert "division by zero" in record.getMessage()
    assert connection.allow_thread_sharing is False


def test_a_handler_that_fires_others_is_limited_as_a_whole(orders: list[Order], declare: Declare) -> None:
    inner = declare(Order, lambda *_: sleep(), name="inner", limits=dq.Limits(run=timedelta(hours=1)), retry=RETRY)
    inner_row = due(orders[0], inner)

    def handler(order: Order, timeout: Timeout) -> None:
        fire(inner_row)

    outer = declare(Order, handler, name="outer", limits=LIMITS, retry=RETRY, atomic=False)
    row = due(orders[1], outer)
    fire(row)
    assert overrun(row) == FAILED
    threads_end()
    assert state(inner_row) == ("pending", "")


@pytest.mark.django_db(transaction=False)
def test_inside_a_transaction_of_a_test_there_is_no_limit(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, lambda *_: time.sleep(2 * LIMIT.total_seconds()), name="slow", limits=LIMITS))
    assert fire(row).fired == (row.pk,)
