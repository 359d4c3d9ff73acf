"""A migration changes a column while workers run. What the server refuses once is repeated, and counts no attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, make_due
from tests.testapp.models import Order, Plain

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="elsewhere no statement is prepared")
on_mysql = pytest.mark.skipif(connection.vendor != "mysql", reason="elsewhere an ALTER waits, or is seen")
Declare = Callable[..., dq.TimeoutPolicy[Any]]


@pytest.fixture
def prepared() -> Iterator[None]:
    """Prepare each statement on the server when it is executed for the second time."""
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**options, "server_side_binding": True, "prepare_threshold": 1}
    yield
    connection.close()
    connection.settings_dict["OPTIONS"] = options


@pytest.fixture
def repeatable_reads() -> Iterator[None]:
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**options, "isolation_level": "repeatable read"}
    yield
    connection.close()
    connection.settings_dict["OPTIONS"] = options


def alter(sql: str) -> None:
    def act() -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {sql}")

    in_another_thread(act)


def widen(size: int) -> None:
    alter(f"{Order._meta.db_table} ALTER COLUMN note TYPE varchar({size})")


@on_postgresql
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("reads", [False, True], ids=["", "in the handler too"])
def test_a_statement_that_was_prepared_before_counts_no_attempt(
    declare: Declare, options: dict[str, Any], reads: bool
) -> None:
    """PostgreSQL refuses it once. Timeouts without a retry were dead, although their handler had not been called."""

    def handler(*_: Any) -> None:
        if reads:
            Order.objects.get(pk=orders[0].pk)

    policy = declare(Order, handler, name="once", retry=dq.Retry.never(), **options)
    orders = [Order.objects.create() for _ in range(6)]
    for order in orders[:3]:
        fire(due(order, policy))
    try:
        widen(60)
        for order in orders[3:]:
            row = due(order, policy)
            for _ in range(4):
                make_due(row)
                fire(row)
    finally:
        widen(50)
    assert set(Timeout.objects.values_list("state", "attempts")) == {("fired", 1)}


@on_postgresql
@pytest.mark.usefixtures("prepared")
def test_a_prepared_statement_is_not_refused_again_and_again_outside_transactions(declare: Declare) -> None:
    """Only a rollback makes psycopg forget it. No attempt was counted, so the timeout neither fired nor was dead."""
    policy = declare(Order, lambda *_: list(Plain.objects.all()), name="reads", atomic=False, retry=dq.Retry.never())
    for _ in range(3):
        fire(due(Order.objects.create(), policy))
    row = due(Order.objects.create(), policy)
    table = Plain._meta.db_table
    alter(f"{table} ALTER COLUMN name TYPE varchar(30)")
    try:
        fire(row)
        make_due(row)
        assert fire(row).fired == (row.pk,)
    finally:
        alter(f"{table} ALTER COLUMN name TYPE varchar(20)")
    row.refresh_from_db()
    assert row.attempts == 1


@on_mysql
@pytest.mark.usefixtures("repeatable_reads")
@pytest.mark.parametrize("options", [{}, {"batch": 20}], ids=["alone", "batch"])
def test_a_table_that_was_altered_after_the_transaction_began_counts_no_attempt(
    declare: Declare, order: Order, options: dict[str, Any]
) -> None:
    """The server asks to repeat the transaction (1412). Timeouts without a retry were dead."""
    changes = [f"{Plain._meta.db_table} ADD COLUMN delayq_new int, ALGORITHM=COPY"]

    def handler(*_: Any) -> None:
        Order.objects.count()  # takes the snapshot
        if changes:
            alter(changes.pop())
        Plain.objects.count()

    policy = declare(Order, handler, name="once", retry=dq.Retry.never(), **options)
    row = due(order, policy)
    try:
        for _ in range(2):
            make_due(row)
            fire(row)
    finally:
        alter(f"{Plain._meta.db_table} DROP COLUMN delayq_new")
    assert list(Timeout.objects.values_list("state", "attempts")) == [("fired", 1)]
