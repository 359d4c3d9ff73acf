"""A handler that takes longer than its limit is abandoned: rolled back, recorded, retried, in every mode."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import DatabaseError, connection, transaction

import django_delayq as dq
from django_delayq import signals
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.integration.firing.conftest import (
    WAIT,
    another_session,
    due,
    fire,
    make_due,
    needs_row_locks,
    state,
)
from tests.integration.firing.limits import FAILED, LIMIT, LIMITS, RETRY, compute, overrun, sleep
from tests.support.waiting import wait_until
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
TRACE: ContextVar[str] = ContextVar("trace", default="")


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
    wait_until(lambda: firing_state.stuck_threads == 0, "the abandoned threads have ended")
    for client in clients:
        client.close()


@pytest.fixture
def one_connection(transactional_db: None) -> Iterator[None]:
    """Use an account that may open one connection."""
    settings, name = connection.settings_dict, connection.ops.quote_name(connection.settings_dict["NAME"])
    owner, account = settings["USER"], f"limited_{os.getpid()}@'127.0.0.1'"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE USER {account} WITH MAX_USER_CONNECTIONS 1")
        cursor.execute(f"GRANT ALL ON {name}.* TO {account}")
    connection.close()
    settings["USER"] = account.partition("@")[0]
    yield
    connection.close()
    settings["USER"] = owner
    with connection.cursor() as cursor:
        cursor.execute(f"DROP USER {account}")


def is_free(order: Order) -> bool:
    """Return whether no transaction holds the row of `order`, or with SQLite the database."""
    try:
        with transaction.atomic():
            Order.objects.select_for_update(nowait=connection.features.has_select_for_update_nowait).get(pk=order.pk)
            Order.objects.filter(pk=order.pk).update(note="free")
    except DatabaseError:
        return False
    return True


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}], ids=["atomic", "outside", "batch"])
@pytest.mark.parametrize("act", [sleep, compute], ids=lambda act: act.__name__)
def test_a_handler_that_takes_too_long_is_rolled_back_and_retried(
    order: Order, declare: Declare, act: Callable[[], None], options: dict[str, Any]
) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        with transaction.atomic():
            Order.objects.filter(pk=order.pk).update(status="half done")
            act()

    row = due(order, declare(Order, handler, name="hangs", limits=LIMITS, retry=RETRY, **options))
    report = fire(row)
    assert (overrun(row), list(report.again)) == (FAILED, [row.pk])
    order.refresh_from_db()
    assert order.status == "unpaid"
    assert is_free(order)
    wait_until(lambda: firing_state.stuck_threads == 0, "its thread was interrupted")


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}], ids=["atomic", "outside", "batch"])
def test_a_handler_whose_socket_never_answers_ends_as_dead_and_holds_no_lock(
    order: Order, declare: Declare, wait_for_answer: Callable[[], None], options: dict[str, Any]
) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        Order.objects.filter(pk=order.pk).update(status="half done")
        wait_for_answer()

    row = due(order, declare(Order, handler, name="asks", limits=LIMITS, retry=dq.Retry([0, 0]), **options))
    for attempt in (1, 2, 3):
        make_due(row)
        fire(row)
        assert overrun(row) == ("dead" if attempt == 3 else "pending", attempt, "TimeLimitExceeded")
        assert is_free(order)
    assert "test_time_limit.py" in row.errors[-1]["message"], "the error names the place"
    assert firing_state.stuck_threads == 3


TRACED = """
import socket, sys, threading, django

django.setup()
from django_delayq.firing.works import RunningWork
from django_delayq.firing.time_limits import _interrupt

ours, theirs = socket.socketpair()
blocked = threading.Thread(target=ours.recv, args=[1], daemon=True)
blocked.start()
running = RunningWork(work=None, using="default", report=None, thread_ids={blocked.ident})
sys.setprofile(lambda *_: None)
running.interrupt(_interrupt)
(lambda: print("it continues"))()
"""


@pytest.mark.django_db
def test_under_a_profiler_a_blocked_thread_does_not_make_its_process_hang(child_environment: dict[str, str]) -> None:
    """Python 3.11 would repeat the first instruction of the next function until that thread wakes up."""
    command = [sys.executable, "-c", TRACED]
    done = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=False, timeout=WAIT)
    assert done.stdout == "it continues\n", done.stderr


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


@pytest.mark.dialect
@needs_row_locks
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
    wait_until(lambda: firing_state.stuck_threads == 0, "its thread has ended")


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["atomic", "outside"])
def test_a_coroutine_is_cancelled_and_may_clean_up(order: Order, declare: Declare, options: dict[str, Any]) -> None:
    seen: list[str] = []

    async def handler(order: Order, timeout: Timeout) -> None:
        try:
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    row = due(order, declare(Order, handler, name="awaits", limits=LIMITS, retry=RETRY, **options))
    fire(row)
    assert (overrun(row), seen) == (FAILED, ["cancelled"])
    wait_until(lambda: firing_state.stuck_threads == 0, "its thread has ended")


def test_a_coroutine_that_blocks_its_event_loop_is_interrupted(order: Order, declare: Declare) -> None:
    async def handler(order: Order, timeout: Timeout) -> None:
        compute()

    row = due(order, declare(Order, handler, name="blocks", limits=LIMITS, retry=RETRY))
    fire(row)
    assert overrun(row) == FAILED
    wait_until(lambda: firing_state.stuck_threads == 0, "its threads have ended")


def test_of_a_shared_transaction_only_the_timeout_whose_handler_hangs_is_charged(
    orders: list[Order], declare: Declare
) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        order.note = "done"
        order.save()
        if order.pk == orders[2].pk:
            sleep()

    policy = declare(Order, handler, name="third", limits=LIMITS, retry=RETRY, together=20)
    rows = [due(order, policy) for order in orders]
    report = fire(*rows)
    assert overrun(rows[2]) == FAILED
    others = [row for row in rows if row is not rows[2]]
    assert list(report.again) == [rows[2].pk]
    assert set(report.fired) == {row.pk for row in others}, "each alone, after the transaction was undone"
    assert {(state(row), row.attempts) for row in others} == {(("fired", "due"), 1)}


def test_what_fired_before_the_one_that_hangs_is_reported_as_fired(orders: list[Order], declare: Declare) -> None:
    calls: list[int] = []
    fired: list[Timeout] = []

    def handler(order: Order, timeout: Timeout) -> None:
        calls.append(order.pk)
        if len(calls) == 2:
            raise ValueError
        if order.pk == orders[3].pk:
            sleep()

    def note(sender: object, timeout: Timeout, **_: object) -> None:
        fired.append(timeout)

    policy = declare(Order, handler, name="one_by_one", limits=LIMITS, retry=RETRY, together=20)
    rows = [due(order, policy) for order in orders]
    signals.timeout_fired.connect(note)
    try:
        report = fire(*rows)
    finally:
        signals.timeout_fired.disconnect(note)
    assert set(report.fired) == {row.pk for row in rows if row is not rows[3]} == {row.pk for row in fired}
    assert overrun(rows[3]) == FAILED


def test_a_batch_that_hangs_is_fired_one_by_one(orders: list[Order], declare: Declare) -> None:
    sizes: list[int] = []

    def handler(objects: Any, timeouts: list[Timeout]) -> None:
        sizes.append(len(timeouts))
        if orders[1].pk in {int(row.object_id) for row in timeouts}:
            sleep()

    rows = [
        due(order, policy)
        for policy in [declare(Order, handler, name="many", batch=5, limits=LIMITS, retry=RETRY)]
        for order in orders
    ]
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
    [record] = [record for record in caplog.records if getattr(record, "event", "") == "callback_abandoned"]
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


def test_a_suspect_that_hangs_is_charged_once(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, lambda *_: sleep(), name="suspect", limits=LIMITS, retry=RETRY))
    fire(row, deliveries=3)
    assert overrun(row) == FAILED


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
    assert (*state(row), row.attempts) == ("pending", "", 0)
    [record] = [each for each in caplog.records if getattr(each, "event", "") == "timeouts_released"]
    assert "division by zero" in record.getMessage()
    assert connection.allow_thread_sharing is False


def test_a_limited_handler_uses_the_connection_and_the_context_of_its_caller(order: Order, declare: Declare) -> None:
    seen: list[object] = []

    def handler(order: Order, timeout: Timeout) -> None:
        seen.extend([connection.connection, TRACE.get()])

    row = due(order, declare(Order, handler, name="looks", limits=LIMITS))
    TRACE.set("a trace")
    fire(row)
    assert seen == [connection.connection, "a trace"]


def test_a_handler_that_fires_others_is_limited_as_a_whole(orders: list[Order], declare: Declare) -> None:
    inner = declare(Order, lambda *_: sleep(), name="inner", limits=dq.Limits(run=timedelta(hours=1)), retry=RETRY)
    inner_row = due(orders[0], inner)

    def handler(order: Order, timeout: Timeout) -> None:
        fire(inner_row)

    outer = declare(Order, handler, name="outer", limits=LIMITS, retry=RETRY, atomic=False)
    row = due(orders[1], outer)
    fire(row)
    assert overrun(row) == FAILED
    wait_until(lambda: firing_state.stuck_threads == 0, "its thread has ended")
    assert state(inner_row) == ("pending", "")


@pytest.mark.django_db(transaction=False)
def test_inside_a_transaction_of_a_test_there_is_no_limit(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, lambda *_: time.sleep(2 * LIMIT.total_seconds()), name="slow", limits=LIMITS))
    assert fire(row).fired == (row.pk,)
