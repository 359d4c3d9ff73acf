"""With few connections the worker fires and syncs all the same, and it opens no more than documented."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout, WorkerSeen
from tests.e2e.databases.conftest import Start, are_settled, each_fired_once
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL"),
]


@contextmanager
def limited_role(size: int) -> Iterator[dict[str, str]]:
    """Create a role that may open `size` connections; yield the environment of a worker with this role."""
    role = f"limited_{os.getpid()}"
    url = os.environ["DELAYQ_TEST_POSTGRESQL_URL"]
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT {size} IN ROLE pg_read_all_data, pg_write_all_data")
    try:
        yield {"DELAYQ_TEST_POSTGRESQL_URL": re.sub(r"//[^@]*@", f"//{role}@", url)}
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [role])
            cursor.execute(f"DROP ROLE {role}")


def test_with_few_connections_everything_goes_on(start: Start) -> None:
    with limited_role(4) as environment:
        worker = start("--concurrency", "4", **environment)
        wait_until(WorkerSeen.objects.exists, "the worker beats")
        for policy in ("remind", "linger", "send_outside"):
            dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(50)], policy, seconds=0)
        since = timezone.now() - timedelta(minutes=29, seconds=55)
        Order.objects.bulk_create([Order(status="unpaid", created_at=since) for _ in range(20)])  # for the sync
        wait_until(lambda: Timeout.objects.count() == 170 and are_settled(), "all are settled")
        text = worker.stop()
    assert each_fired_once() == 170, text
    assert "This worker runs 1 of them" in text
    assert "failed" not in text, "nothing was refused a connection"
    assert not WorkerSeen.objects.exists(), "a worker that exits deletes its row"


def test_a_worker_uses_three_connections_more_than_it_has_threads(start: Start) -> None:
    worker = start("--concurrency", "4")
    wait_until(WorkerSeen.objects.exists, "the worker beats")
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(200)], "linger", seconds=0)
    counts: list[int] = []
    wait_until(lambda: counts.append(len(sessions())) or are_settled(), "all are settled")  # type: ignore[func-returns-value]
    wait_until(lambda: len(sessions()) == 4 + 3, "each thread has its connection")
    assert max(counts) <= 4 + 3
    assert "of them" not in worker.stop()


def sessions() -> set[int]:
    """The server's numbers of the connections that others than this test have to its database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return {number for (number,) in cursor.fetchall()}
