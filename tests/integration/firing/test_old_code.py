"""A process whose code does not fit the tables any more: it leaves timeouts soon to the workers of the new release."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

from django_delayq.firing import Work, run
from django_delayq.firing.state import MISFIT_MAX_SECONDS, firing_state
from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def renamed_column() -> Iterator[None]:
    """The migration of the new release has been applied."""
    table = Order._meta.db_table

    def rename(old: str, new: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")

    firing_state.forget()
    due_orders("remind")
    rename("note", "remark")
    yield
    rename("remark", "note")
    firing_state.forget()


@pytest.mark.usefixtures("renamed_column")
def test_its_backoff_stays_short() -> None:
    row = Timeout.objects.get()
    for _ in range(12):
        report = run(Work(row.policy, (row.pk,), (row.object_id,)), "default")
        assert (report.again[row.pk] - database_now("default")).total_seconds() <= 1.5 * MISFIT_MAX_SECONDS
    assert Timeout.objects.get().attempts == 0
