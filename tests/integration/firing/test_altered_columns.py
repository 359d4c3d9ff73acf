"""A migration changes a column while workers run whose connections have prepared statements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, make_due
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="elsewhere no statement is prepared"),
]
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


def widen(size: int) -> None:
    def alter() -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {Order._meta.db_table} ALTER COLUMN note TYPE varchar({size})")

    in_another_thread(alter)


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
