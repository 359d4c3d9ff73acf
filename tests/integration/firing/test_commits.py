"""Transactions by hand: one that would end before the handler is refused, one outside is undone unless it was ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

import django_delayq as dq
from tests.integration.firing.conftest import due, fire, state
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
FIRED = ("fired", "due")


def raw(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


COMMITS = ["COMMIT", "commit", "begin", " START  TRANSACTION", "/* the\nend */ COMMIT", "-- the end\nCOMMIT"]
DDL = ["CREATE TABLE delayq_new (id int)", "truncate table testapp_effect", "ANALYZE TABLE testapp_effect"]
DDL += ["SET autocommit = 1", "set @@session.autocommit = ON", "CHECK TABLE testapp_effect", "FLUSH STATUS"]
DDL += ["RESET QUERY CACHE", "CACHE INDEX testapp_effect IN hot", "LOAD INDEX INTO CACHE testapp_effect"]


@pytest.mark.parametrize("sql", [*COMMITS, *DDL])
@pytest.mark.parametrize("mode", [{}, {"batch": 5}, {"together": 5}])
def test_a_statement_that_would_commit_before_the_end_of_the_handler_is_refused(
    orders: list[Order], declare: Declare, sql: str, mode: dict[str, Any]
) -> None:
    """The timeouts would be fired for good, although the handler fails after that."""
    if sql in DDL and connection.features.can_rollback_ddl:
        pytest.skip("this database can roll DDL back")

    def handler(*_: Any) -> None:
        Effect.objects.create(what="half")
        raw(sql)
        raise ValueError("the second half")

    policy = declare(Order, handler, name="commits", retry=dq.Retry([60]), **mode)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert {state(row)[0] for row in rows} == {"pending"}
    assert rows[0].errors[0]["error"] == "BrokenTransaction"
    assert "atomic=False" in rows[0].errors[0]["message"]
    assert not Effect.objects.exists()


@pytest.mark.parametrize(
    "sql",
    [
        "SET @password = 'autocommit'",
        "SET STATEMENT max_statement_time = 100 FOR UPDATE testapp_effect SET what = 'password, autocommit'",
    ],
)
def test_setting_something_else_commits_nothing(order: Order, declare: Declare, sql: str) -> None:
    if connection.vendor != "mysql":
        pytest.skip("of MySQL and MariaDB")
    row = due(order, declare(Order, lambda obj, timeout: raw(sql), name="sets"))
    fire(row)
    assert state(row) == FIRED


@pytest.mark.parametrize("sql", ["CREATE TEMPORARY TABLE delayq_new (id int)", "DROP TEMPORARY TABLE delayq_new"])
def test_a_temporary_table_commits_nothing(order: Order, declare: Declare, sql: str) -> None:
    if sql.startswith("DROP") and connection.features.can_rollback_ddl:
        pytest.skip("of MySQL and MariaDB")
    raw("CREATE TEMPORARY TABLE delayq_new (id int)" if sql.startswith("DROP") else "SELECT 1")
    row = due(order, declare(Order, lambda obj, timeout: raw(sql), name="makes_a_table"))
    fire(row)
    assert state(row) == FIRED
    raw("DROP TABLE IF EXISTS delayq_new")


BY_HAND = {
    "ended": (["BEGIN", "{write}", "COMMIT"], True),
    "left open": (["BEGIN", "{write}"], False),
    "left open behind a savepoint": (["BEGIN", "{write}", "SAVEPOINT a", "ROLLBACK TO SAVEPOINT a"], False),
}
if connection.vendor == "mysql":
    BY_HAND["XA, ended"] = (["XA START 'a'", "{write}", "XA END 'a'", "XA COMMIT 'a' ONE PHASE"], True)


@pytest.mark.parametrize("left", BY_HAND)
def test_a_transaction_by_hand_outside_of_one_is_undone_unless_it_was_ended(
    order: Order, declare: Declare, left: str
) -> None:
    statements, is_kept = BY_HAND[left]

    def handler(*_: Any) -> None:
        write = f"UPDATE testapp_order SET status = 'done' WHERE id = {order.pk}"
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement.format(write=write))

    row = due(order, declare(Order, handler, name="by_hand", atomic=False, retry=dq.Retry([60])))
    assert bool(fire(row).fired) == is_kept
    assert Order.objects.get(pk=row.object_id).status == ("done" if is_kept else "unpaid")
