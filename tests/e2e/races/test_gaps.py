"""MariaDB and MySQL lock the gap after a deleted entry of a unique index, which must not cause deadlocks.

Each test is a deadlock that occurred in a race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

import django_delayq as dq
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import Timeout
from tests.e2e.races.sessions import Session, deadlocks, meanwhile, needs_row_locks, transaction_with
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True), needs_row_locks]


@pytest.fixture
def former_entries_stay() -> Iterator[None]:
    """Keep deleted entries in the index: InnoDB purges nothing that an older reader may still need."""

    def read() -> None:
        with connection.cursor() as cursor:
            if connection.vendor == "mysql":
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SELECT count(*) FROM django_delayq_timeout")

    with transaction_with(read):
        yield


@pytest.fixture
def neighbours() -> tuple[Order, Order]:
    """Two orders whose slots lie side by side in the index: one that was given up, and behind it one that is taken."""
    rows = [dq.schedule_timeout(Order.objects.create(status="paid"), "remind", hours=1) for _ in range(2)]
    former, latter = sorted(rows, key=lambda row: row.slot)
    assert dq.cancel_timeout(former)
    return Order.objects.get(pk=former.object_id), Order.objects.get(pk=latter.object_id)


CHANGES: dict[str, Callable[[Order], Any]] = {
    "cancelled": lambda order: dq.cancel_timeout(order, "remind"),
    "cancelled_in_bulk": lambda order: dq.cancel_timeouts(dq.pending_timeouts(order, "remind")),
    "deleted": lambda order: order.delete(),
}


@pytest.mark.usefixtures("former_entries_stay")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["single", "bulk"])
def test_a_slot_that_is_taken_again_waits_for_no_neighbour(
    neighbours: tuple[Order, Order], change: str, way: str
) -> None:
    former, latter = neighbours
    latter_id, table = str(latter.pk), connection.ops.quote_name(Timeout._meta.db_table)

    def take_again() -> None:
        if way == "single":
            dq.schedule_timeout(former, "remind", hours=2)
        else:
            dq.schedule_timeouts([former], "remind", hours=2)

    with meanwhile(take_again, lambda sql: f"UPDATE {table}" in sql, before=True):
        CHANGES[change](latter)
    assert sorted(Timeout.objects.values_list("object_id", "state")) == sorted(
        [(str(former.pk), "cancelled"), (str(former.pk), "pending"), (latter_id, "cancelled")]
    )


@pytest.mark.usefixtures("former_entries_stay", "counted_deadlocks")
def test_a_firing_waits_for_nobody_in_a_gap() -> None:
    """Taking a slot again locks the gap before it. If the transaction then locks an object that fires, both wait.

    A batch, because on PostgreSQL one statement fires others, and nothing can come between its steps.
    """
    rows = [dq.schedule_timeout(Order.objects.create(status="paid"), "remind_many", seconds=0) for _ in range(2)]
    due, former = sorted(rows, key=lambda row: row.slot)
    assert dq.cancel_timeout(former)
    begins, before = Order.objects.get(pk=former.object_id), deadlocks()
    sessions: list[Session] = []

    def take_again_and_want_the_other() -> None:
        with transaction.atomic():
            dq.schedule_timeout(begins, "remind_many", hours=1)
            Order.objects.select_for_update().get(pk=due.object_id)

    def look(step: str) -> None:
        if step == "checked" and not sessions:
            sessions.append(Session(take_again_and_want_the_other))
            sessions[0].wait_until_it_waits()

    works, _ = plan({due.pk: 1}, "default")
    set_checkpoint_hook(look)
    try:
        run(works[0], "default")
    finally:
        set_checkpoint_hook(None)
    sessions[0].end()
    assert deadlocks() == before
    due.refresh_from_db()
    assert (due.state, due.attempts) in {("pending", 0), ("fired", 1)}
