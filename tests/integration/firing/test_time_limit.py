"""A handler that takes longer than its limit is abandoned: rolled back, recorded, retried, in every mode."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.db import DatabaseError, connection, transaction

import django_delayq as dq
from django_delayq import signals
from django_delayq.models import Timeout
from tests.e2e.races.sessions import needs_row_locks, transaction_with
from tests.integration.firing.conftest import MODES, due, fire, state
from tests.integration.firing.handlers import LIMITED_MODES, WAIT, Declare, Log, Patch, execute
from tests.integration.firing.limits import FAILED, LIMIT, LIMITS, RETRY, compute, overrun, sleep, threads_end
from tests.integration.firing.rows import FIRED, UNTRIED, hearing, logged, tried
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


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


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor != "mysql", reason="of MySQL and MariaDB, where another connection cuts one")
@pytest.mark.usefixtures("one_connection")
def test_a_handler_is_cut_off_although_its_account_may_open_no_other_connection(order: Order, declare: Declare) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        order.save()
        sleep()

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
    with transaction_with(lambda: Order.objects.filter(pk=orders[1].pk).update(note="locked")):
        fire(row)
        assert overrun(row) == FAILED
        assert is_free(orders[0])
    assert is_free(orders[1])
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


def test_the_setting_is_the_limit_of_other_policies(orders: list[Order], declare: Declare, settings: Settings) -> None:
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
