"""MariaDB and MySQL lock the gap after a deleted entry of a unique index, which must not cause deadlocks.

The test is a deadlock that occurred in a race.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

import django_delayq as dq
from django_delayq.models import Timeout
from tests.e2e.races.sessions import meanwhile, needs_row_locks, transaction_with
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


@pytest.mark.usefixtures("former_entries_stay")
@pytest.mark.parametrize("is_bulk", [False, True])
def test_a_slot_that_is_taken_again_waits_for_no_neighbour(neighbours: tuple[Order, Order], is_bulk: bool) -> None:
    former, latter = neighbours
    latter_id, table = str(latter.pk), connection.ops.quote_name(Timeout._meta.db_table)

    def take_again() -> None:
        if is_bulk:
            dq.schedule_timeouts([former], "remind", hours=2)
        else:
            dq.schedule_timeout(former, "remind", hours=2)

    with meanwhile(take_again, lambda sql: f"UPDATE {table}" in sql, before=True):
        if is_bulk:
            dq.cancel_timeouts(dq.pending_timeouts(latter, "remind"))
        else:
            dq.cancel_timeout(latter, "remind")
    assert sorted(Timeout.objects.values_list("object_id", "state")) == sorted(
        [(str(former.pk), "cancelled"), (str(former.pk), "pending"), (latter_id, "cancelled")]
    )
