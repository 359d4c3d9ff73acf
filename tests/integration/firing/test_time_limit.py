"""A handler that takes longer than its limit is abandoned: rolled back, recorded, retried, in every mode."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, Error, connection, transaction

import django_delayq as dq
from django_delayq import signals
from django_delayq.exceptions import Abandoned
from django_delayq.firing import time_limits
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, state
from tests.integration.firing.handlers import LIMITED_MODES, WAIT, Declare, Log, Patch, raising
from tests.integration.firing.limits import FAILED, LIMIT, LIMITS, RETRY, compute, overrun, sleep, threads_end
from tests.integration.firing.rows import FIRED, UNTRIED, hearing, logged, tried
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


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
@pytest.mark.parametrize(
    ("act", "deliveries"), [(sleep, 1), (compute, 1), (sleep, 3)], ids=["sleep", "compute", "suspect"]
)
def test_what_takes_too_long_is_rolled_back_and_retried(
    order: Order, declare: Declare, act: Any, deliveries: int, mode: str
) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        with transaction.atomic():
            Order.objects.filter(pk=order.pk).update(status="half done")
            act()

    row = due(order, declare(Order, handler, name="hangs", limits=LIMITS, retry=RETRY, **MODES[mode]))
    report = fire(row, deliveries=deliveries)
    assert (overrun(row), list(report.again)) == (FAILED, [row.pk])
    order.refresh_from_db()
    assert (order.status, is_free(order)) == ("unpaid", True)
    threads_end()


@pytest.mark.parametrize(("atomic", "blocks"), [(True, False), (False, False), (True, True)])
def test_a_coroutine_is_cancelled_or_interrupted(order: Order, declare: Declare, atomic: bool, blocks: bool) -> None:
    seen: list[str] = []

    async def handler(order: Order, timeout: Timeout) -> None:
        try:
            compute() if blocks else await asyncio.sleep(WAIT)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    row = due(order, declare(Order, handler, name="awaits", limits=LIMITS, retry=RETRY, atomic=atomic))
    fire(row)
    assert (overrun(row), seen) == (FAILED, ["cancelled"] * (not blocks))
    threads_end()


@pytest.mark.parametrize("mode", ["together", "batch"])
def test_of_a_shared_transaction_only_what_hangs_is_charged(orders: list[Order], declare: Declare, mode: str) -> None:
    sizes: list[int] = []

    def handler(target: Any, timeouts: Any) -> None:
        ids = [int(row.object_id) for row in (timeouts if mode == "batch" else [timeouts])]
        sizes.append(len(ids))
        if len(sizes) == 2 and mode == "together":
            raise ValueError  # from here on each is alone, and some have fired before one hangs
        if orders[3].pk in ids:
            sleep()

    policy = declare(Order, handler, name="one_by_one", limits=LIMITS, retry=RETRY, **MODES[mode])
    rows = [due(order, policy) for order in orders]
    with hearing(signals.timeout_fired) as heard:
        report = fire(*rows)
    hung = rows.pop(3)
    assert (overrun(hung), list(report.again)) == (FAILED, [hung.pk])
    assert set(report.fired) == {row.pk for row in rows} == {pk for _, pk in heard}
    assert [tried(row) for row in rows] == [(FIRED, 1)] * 4
    assert mode == "together" or sizes == [5, 1, 1, 1, 1, 1]


def test_a_callback_that_hangs_stops_no_other(orders: list[Order], declare: Declare, caplog: Log) -> None:
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
    assert {state(row) for row in rows} == {FIRED}
    assert called == [order.pk for order in orders if order.pk != orders[1].pk]
    [record] = logged(caplog, "callback_abandoned")
    assert "its transaction is committed" in record.getMessage()


def test_the_setting_is_the_limit_of_other_policies(orders: list[Order], declare: Declare, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HANDLER_LIMIT": LIMIT}
    end = threading.Event()
    default = due(orders[0], declare(Order, lambda *_: end.wait(WAIT), name="default", retry=RETRY))
    own = due(orders[1], declare(Order, lambda *_: end.wait(0.5), name="own", limits=dq.Limits(run=100 * LIMIT)))
    assert fire(default, own).fired == (own.pk,)
    end.set()
    assert overrun(default) == FAILED


@pytest.mark.parametrize("limits", [None, LIMITS], ids=["without", "limited"])
def test_an_error_outside_of_handlers_releases_the_work(
    order: Order, declare: Declare, limits: dq.Limits | None, monkeypatch: Patch, caplog: Any
) -> None:
    row = due(order, declare(Order, lambda *_: None, name="works", limits=limits))
    monkeypatch.setattr("django_delayq.firing.rails.room", lambda *_: 1 / 0)
    report = fire(row)
    assert list(report.again) == [row.pk]
    assert tried(row) == UNTRIED
    [record] = logged(caplog, "timeouts_released")
    assert "division by zero" in record.getMessage()
    assert connection.allow_thread_sharing is False


@pytest.mark.django_db(transaction=False)
def test_inside_a_transaction_of_a_test_there_is_no_limit(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, lambda *_: time.sleep(2 * LIMIT.total_seconds()), name="slow", limits=LIMITS))
    assert fire(row).fired == (row.pk,)


def values_of(row: Timeout) -> dict[str, Any]:
    row.refresh_from_db()
    return {field.attname: getattr(row, field.attname) for field in Timeout._meta.concrete_fields}


COMMITTED: list[int] = []
"""What the callbacks of handlers that were abandoned have done: nothing."""


def write() -> None:
    Effect.objects.create(what="late")


def write_in_a_transaction() -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: COMMITTED.append(1))
        write()


def write_on_a_new_connection() -> None:
    connection.close()
    write()


@pytest.mark.dialect
@LIMITED_MODES
@pytest.mark.parametrize("returns", [True, False], ids=["returns", "raises"])
def test_what_returns_later_can_change_nothing(order: Order, declare: Declare, mode: str, returns: bool) -> None:
    go_on, refused = threading.Event(), list[str]()

    def handler(target: Any, timeouts: Any) -> None:
        with connection.cursor() as cursor:
            if connection.in_atomic_block:
                transaction.on_commit(lambda: COMMITTED.append(1))
            with contextlib.suppress(Abandoned):  # it catches everything, and continues
                go_on.wait(WAIT)
            delete = partial(cursor.execute, "DELETE FROM testapp_order")
            for act in (write, delete, write_in_a_transaction, write_on_a_new_connection):
                try:
                    act()
                except Error as error:
                    refused.append(str(error))
        if not returns:
            raise ValueError

    row = due(order, declare(Order, handler, name="late", limits=LIMITS, retry=RETRY, **MODES[mode]))
    fire(row)
    before = values_of(row)
    assert overrun(row) == FAILED
    go_on.set()
    threads_end()
    assert (len(refused), COMMITTED) == (4, [])
    assert values_of(row) == before
    assert not Effect.objects.exists()
    assert Order.objects.exists()


@pytest.mark.dialect
def test_after_one_that_returns_later_no_other_is_called(orders: list[Order], declare: Declare) -> None:
    """They have fired by then, each alone, and what a handler does outside the database would be done twice."""
    go_on, called = threading.Event(), list[int]()

    def handler(order: Order, timeout: Timeout) -> None:
        called.append(order.pk)
        if order.pk == orders[0].pk:
            with contextlib.suppress(Abandoned):  # it catches everything, and returns as if nothing had happened
                go_on.wait(WAIT)

    policy = declare(Order, handler, name="late", limits=LIMITS, retry=RETRY, together=20)
    first, *others = [due(order, policy) for order in orders]
    assert set(fire(first, *others).fired) == {row.pk for row in others}
    assert overrun(first) == FAILED
    go_on.set()
    threads_end()
    assert called == [order.pk for order in orders]


@pytest.mark.dialect
@pytest.mark.parametrize(("mode", "step"), [("alone", "handled"), ("batch", "committed"), ("outside", "settled")])
def test_a_handler_that_has_returned_is_not_abandoned(order: Order, declare: Declare, mode: str, step: str) -> None:
    """However long the commit takes: exactly one of fired and failed is true."""
    row = due(order, declare(Order, name="quick", limits=LIMITS, retry=RETRY, **MODES[mode]))
    set_checkpoint_hook(lambda reached: time.sleep(2 * LIMIT.total_seconds()) if reached == step else None)
    assert fire(row).fired == (row.pk,)
    assert (tried(row), row.errors) == ((FIRED, 1), [])


# Python may be in a callback of its garbage collector when the exception arrives, and reports it there.
class SoftTimeLimit(Exception):
    """What Celery raises by a signal handler, in the thread that waits for the handler."""


@pytest.fixture
def uninterrupted(monkeypatch: Patch) -> None:
    """Let abandoned handlers continue. Otherwise one that is abandoned at once may end before it writes anything."""
    monkeypatch.setattr(time_limits, "_interrupt", lambda thread_id: None)


class Interrupted(threading.Thread):
    """A thread whose `start` is interrupted by an exception of a signal handler while it waits for the thread."""

    def start(self) -> None:
        super().start()
        wait_until(lambda: any(running.timeout_ids for running in list(firing_state.running.values())))
        raise SoftTimeLimit


@pytest.mark.dialect
@pytest.mark.usefixtures("uninterrupted")
@pytest.mark.parametrize("starts", [False, True])
@LIMITED_MODES
def test_a_signal_leaves_no_two_threads_on_one_connection(
    order: Order, declare: Declare, monkeypatch: Patch, mode: str, starts: bool
) -> None:
    """As `task_soft_time_limit` of Celery, if it is shorter than the limit of the policy. It counts as a failure."""
    go_on = threading.Event()

    def handler(target: Any, timeouts: Any) -> None:
        if not starts:
            signal.raise_signal(signal.SIGUSR1)  # Python calls the handler of a signal in the main thread
        go_on.wait(WAIT)
        with contextlib.suppress(Error):
            write()

    limits = LIMITS if starts else dq.Limits(run=timedelta(seconds=WAIT))
    row = due(order, declare(Order, handler, name="late", limits=limits, retry=RETRY, **MODES[mode]))
    former = signal.signal(signal.SIGUSR1, raising(SoftTimeLimit()))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", Interrupted if starts else threading.Thread)
            fire(row)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert firing_state.stuck_threads == 1
    failed = overrun(row)
    go_on.set()
    threads_end()
    assert failed == overrun(row) == ("pending", 1, "SoftTimeLimit")
    assert not Effect.objects.exists()


@pytest.mark.dialect
@pytest.mark.parametrize("error", [SoftTimeLimit(), RuntimeError()])
def test_a_thread_that_cannot_be_started_counts_no_attempt(
    order: Order, declare: Declare, monkeypatch: Patch, error: Exception
) -> None:
    """As in a container with a limit of threads. This attempt is not counted: no handler was called."""
    row = due(order, declare(Order, name="late", limits=LIMITS, retry=RETRY))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", raising(error))
        assert row.pk in fire(row).again
    assert overrun(row) == ("pending", 0, "")
    assert fire(row).fired == (row.pk,)
