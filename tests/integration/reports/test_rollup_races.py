"""Each row counts once while threads settle, count, retry and delete rows at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, timedelta
from typing import Any

import pytest
from django.db import Error, connection

from django_delayq import TimeoutPolicy, clock, operations
from django_delayq.ledger.rollups import roll_up
from django_delayq.models import Timeout
from django_delayq.monitoring.reports import policy_report
from django_delayq.worker.sweep import prune
from tests.integration.reports.rounds import settled_row, utc
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
NOW = utc(2026, 5, 10, 12)
LABEL, ROWS, TURNS = "testapp.order.told", 600, 20
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)


def settled() -> Iterator[Timeout]:
    """Rows of two days; every fourth one is dead."""
    for number in range(ROWS):
        state, cause = ("dead", "retries") if number % 4 == 0 else ("fired", "due")
        order = Order.objects.create()
        at = NOW - (number % 2) * DAY - (number + 3) * MINUTE
        yield settled_row(at, state, cause, label=LABEL, object_id=str(order.pk), attempts=1)


def retry_some() -> None:
    dead = Timeout.objects.filter(state="dead").values_list("pk", flat=True)
    operations.retry(Timeout.objects.filter(pk__in=list(dead[:5])), by="test")


def test_each_row_counts_once_while_threads_count_retry_and_delete_rows(
    declare: Callable[..., TimeoutPolicy[Any]],
) -> None:
    if not connection.features.has_select_for_update:
        pytest.skip("SQLite has no row locks: a writer holds the whole database")
    policy = declare(Order, name="told")
    Timeout.objects.bulk_create(list(settled()))
    errors = list[BaseException]()

    def total() -> int:
        return policy_report(policy, first=date(2026, 5, 1)).total.rounds

    def repeat(work: Callable[[int], object]) -> None:
        try:
            for turn in range(TURNS):
                with suppress(Error):  # a deadlock: workers try again, too
                    work(turn)
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    def delete(turn: int) -> None:
        prune("default", labels=[LABEL], age=2 * DAY - 2 * turn * 60 * MINUTE)

    works = [lambda _: roll_up("default"), delete, lambda _: retry_some()]
    with clock.set_to(NOW):
        threads = [threading.Thread(target=repeat, args=[work]) for work in works * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        expected = ROWS - Timeout.objects.filter(state="pending").count()
        assert total() == expected
        roll_up("default")
        assert total() == expected
        prune("default", labels=[LABEL], age=MINUTE)
        assert total() == expected
