"""The database goes away at every step of a firing: nothing is lost or done twice, and no attempt is counted."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import settle_expired
from django_delayq.firing.settling import MAX_LOSSES
from tests.engine.fault_proxy import FaultProxy
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, make_due, state
from tests.integration.firing.handlers import Declare, execute, once_at, raising
from tests.integration.firing.rows import PENDING, UNTRIED, tried
from tests.testapp.models import Effect, Order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dialect,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no connection to lose"),
]
SOON = timedelta(seconds=1)


def kill_own_connection() -> None:
    """The server ends this thread's connection, as a restart or a failover does."""
    is_postgresql = connection.vendor == "postgresql"
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()" if is_postgresql else "SELECT CONNECTION_ID()")
        [number] = cursor.fetchone()
    end = f"SELECT pg_terminate_backend({number}, 5000)" if is_postgresql else f"KILL {number}"
    in_another_thread(lambda: execute(end))


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """This thread's connection goes through a proxy that can lose a reply."""
    address = connection.settings_dict["HOST"], int(connection.settings_dict["PORT"])

    connection.close()
    with FaultProxy(address) as started:
        connection.settings_dict["HOST"], connection.settings_dict["PORT"] = "127.0.0.1", str(started.port)
        yield started
        connection.close()
        connection.settings_dict["HOST"], connection.settings_dict["PORT"] = address[0], str(address[1])


@pytest.mark.parametrize("step", ["planned", "begun", "locked", "checked", "marked", "handled"])
def test_a_connection_lost_before_the_commit_undoes_all_and_counts_no_attempt(orders: list[Order], step: str) -> None:
    # Where one statement locks, checks and marks, only a batch comes to the steps between.
    policy = "remind_many" if step in {"locked", "checked"} else "cancel_unpaid"
    rows = [due(order, policy) for order in orders[:2]]
    once_at(step, kill_own_connection)
    report = fire(rows[0])
    assert list(report.again) == [rows[0].pk]
    assert report.again[rows[0].pk] - timezone.now() < SOON
    assert tried(rows[0]) == UNTRIED
    assert not Effect.objects.exists()
    assert fire(*rows).fired == tuple(row.pk for row in rows)
    assert Effect.objects.count() == 2


@pytest.mark.parametrize("how", MODES)
def test_a_handler_that_loses_it_each_time_does_not_run_for_ever(order: Order, declare: Declare, how: str) -> None:
    """For example because it waits for a partner for longer than the server or a firewall waits for a statement."""
    calls: list[int] = []

    def handler(obj: Any, timeout: Any) -> None:
        calls.append(1)
        kill_own_connection()
        Effect.objects.create(what="sent", object_id=order.pk)

    row = due(order, declare(Order, handler, name="silent", retry=dq.Retry.never(), **MODES[how]))
    for _ in range(MAX_LOSSES):
        assert list(fire(row).again) == [row.pk]
        assert tried(row) == UNTRIED
        make_due(row)
    assert fire(row).done == (row.pk,)
    assert (state(row), row.attempts, len(calls)) == (("dead", "retries"), 1, MAX_LOSSES + 1)
    assert row.errors[0]["error"] in {"OperationalError", "InterfaceError"}


def test_a_commit_whose_answer_is_lost_is_decided_by_the_row(order: Order, proxy: FaultProxy) -> None:
    row = due(order, "cancel_unpaid")
    once_at("handled", proxy.lose_next_reply)
    report = fire(row)
    assert proxy.lost == 1
    assert (list(report.again), report.done) == ([row.pk], ())
    assert state(row) == ("fired", "due"), "the server had committed"
    assert fire(row).done == (row.pk,)
    assert Effect.objects.count() == 1


def test_a_failure_that_cannot_be_recorded_is_repeated_and_not_counted(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(ValueError()), name="fails", retry=dq.Retry([60])))
    once_at("undone", kill_own_connection)
    assert list(fire(row).again) == [row.pk]
    assert tried(row) == UNTRIED
    fire(row)
    assert tried(row) == (PENDING, 1)
    make_due(row)
    assert settle_expired("default").again == {}
