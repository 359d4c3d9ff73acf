"""The most frequent statements are prepared on PostgreSQL, and what could break that fails no firing and no call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.sql import statements
from tests.integration.firing.conftest import due, fire
from tests.integration.firing.handlers import Log, execute
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL"),
]
MARK, INSERT, CANCEL = "delayq_given", "INSERT INTO", "SET %cancelled"


def is_direct() -> bool:
    """Return whether no pooler is between this thread and its session of PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return bool(cursor.fetchone()[0] == connection.connection.info.backend_pid)


def generic_plans(part: str) -> int:
    """Return how often this thread has used the generic plan of the prepared statement with `part` in its SQL."""
    with connection.cursor() as cursor:
        like = f"PREPARE delayq%{part}%"
        cursor.execute("SELECT sum(generic_plans) FROM pg_prepared_statements WHERE statement LIKE %s", [like])
        return int(cursor.fetchone()[0] or 0)


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    """Begin and end with a new connection."""
    connection.close()
    yield
    connection.close()


@pytest.fixture
def is_prepared() -> bool:
    return is_direct() and not connection.settings_dict["OPTIONS"].get("server_side_binding")


def use(count: int = 1) -> None:
    """Schedule, fire, schedule and cancel, which must work at the first attempt."""
    for _ in range(count):
        order = Order.objects.create(status="unpaid")
        row = due(order, "remind")
        assert fire(row).fired == (row.pk,)
        dq.schedule_timeout(order, "remind", hours=1)
        assert dq.cancel_timeout(order, "remind")
    assert set(Timeout.objects.filter(state=Timeout.State.FIRED).values_list("attempts", flat=True)) == {1}


def prepared() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'delayq%%'")
        return int(cursor.fetchone()[0])


def test_after_some_runs_each_keeps_its_plan(is_prepared: bool) -> None:
    use(statements.PREPARED_AFTER)
    assert prepared() <= 1, "the INSERT has run twice as often"
    use(10)
    for part in (MARK, INSERT, CANCEL):
        assert bool(generic_plans(part)) == is_prepared, part


def test_in_a_transaction_of_the_caller_nothing_is_prepared() -> None:
    """An error would undo what the caller has written."""
    use(20)
    with transaction.atomic(), CaptureQueriesContext(connection) as captured:
        dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
    assert not any("EXECUTE" in each["sql"] for each in captured)


def test_what_makes_plans_useless_fails_nothing(is_prepared: bool, caplog: Log) -> None:
    """A migration changes a column, and then a pool discards what its client has left."""
    use(20)
    execute("ALTER TABLE testapp_order ALTER COLUMN status TYPE varchar(77)")
    try:
        use(20)
    finally:
        execute("ALTER TABLE testapp_order ALTER COLUMN status TYPE varchar(20)")
    use(20)
    assert bool(prepared()) == is_prepared
    with connection.connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    use(20)
    assert prepared() == 0, "one error is enough"
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
