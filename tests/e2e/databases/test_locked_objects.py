"""Objects that others lock for long cost little: each of their timeouts is tried again every few seconds."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable

import pytest
from django.db import connection, transaction

import django_delayq as dq
from django_delayq.firing.state import LOCKED_MAX_SECONDS
from django_delayq.models import Timeout
from tests.support.processes import processor_seconds
from tests.support.processes import start_worker as start_worker  # noqa: PLC0414 - a fixture, for the test here
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]
logger = logging.getLogger(__name__)
LOCKED = 500
SECONDS = 6.0


def transactions() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


@pytest.mark.skipif(connection.vendor != "postgresql", reason="counts PostgreSQL's transactions")
def test_hundreds_of_locked_objects_are_tried_every_few_seconds(
    start_worker: Callable[..., subprocess.Popen[bytes]],
) -> None:
    Order.objects.bulk_create([Order(status="new") for _ in range(LOCKED)])
    with transaction.atomic():
        orders = list(Order.objects.select_for_update().order_by("pk"))
        rows_before = len(orders)
    dq.schedule_timeouts(orders, "remind", seconds=2)
    with transaction.atomic():
        assert len(Order.objects.select_for_update().order_by("pk")) == rows_before
        worker = start_worker(seconds={"LEASE": 10})
        time.sleep(14)  # not to wait for anything: until all have been tried a few times
        before, work = transactions(), processor_seconds(worker.pid)
        time.sleep(SECONDS)
        tried = (transactions() - before) / SECONDS
        burnt = (processor_seconds(worker.pid) - work) / SECONDS
    logger.info("%.0f transactions a second, %.0f %% of a core", tried, 100 * burnt)
    wait_until(lambda: not Timeout.objects.unsettled().exists(), "all are settled")
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}
    assert tried < 2 * LOCKED / LOCKED_MAX_SECONDS, "each is tried after about so many seconds"
