"""Few connections, a demoted primary: the worker fires, sweeps, syncs and beats all the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.db import connection

import django_delayq as dq
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.redis_clients import forget_engine
from django_delayq.sql.now import database_now
from tests.e2e.databases.conftest import SHORT, OwnDatabase, Start, are_settled, each_fired_once, fire_some
from tests.support.waiting import wait_until
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL"),
]
LATE = timedelta(seconds=20)


@pytest.fixture
def short_horizon(settings: Settings) -> Iterator[None]:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(seconds=SHORT["HORIZON"])}
    yield
    forget_engine()


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


@pytest.mark.usefixtures("short_horizon")
def test_with_few_connections_everything_goes_on_in_time(start: Start) -> None:
    with limited_role(4) as environment:
        worker = start("--concurrency", "4", **environment)
        wait_until(WorkerSeen.objects.exists, "the worker beats")
        schedule_beyond_the_horizon()
        counts, beats = watch_until_all_are_settled()
        text = worker.stop()
    assert each_fired_once() == 320, text
    fired = Timeout.objects.all()
    assert max(row.settled_at - row.due_at for row in fired if row.settled_at) < LATE, "the sweep brought them in time"
    assert max(counts) <= 4
    assert max(beats) < 16, "the heartbeat is written every 5 s"
    assert "This worker runs 1 of them" in text
    assert "failed" not in text, "nothing was refused a connection"
    assert not WorkerSeen.objects.exists(), "a worker that exits deletes its row"


def schedule_beyond_the_horizon() -> None:
    """300 timeouts of three policies that Redis does not know yet, and 20 rows that only the sync can arm."""
    now = database_now("default")
    for seconds, policy in enumerate(("remind", "linger", "send_outside"), 5):
        orders = [Order.objects.create(status="new") for _ in range(100)]
        dq.schedule_timeouts(orders, policy, at=now + timedelta(seconds=seconds))
    since = now - timedelta(minutes=30) + timedelta(seconds=7)
    Order.objects.bulk_create([Order(status="unpaid", created_at=since) for _ in range(20)])


def watch_until_all_are_settled() -> tuple[list[int], list[float]]:
    """Return the number of connections of the worker, and the age of its heartbeat."""
    counts: list[int] = []
    beats: list[float] = []

    def all_are_settled() -> bool:
        counts.append(len(sessions()))
        seen = WorkerSeen.objects.get().seen_at
        beats.append((database_now("default") - seen).total_seconds())
        return Timeout.objects.count() == 320 and are_settled()

    wait_until(all_are_settled, "all are settled")
    return counts, beats


def test_a_worker_uses_three_connections_more_than_it_has_threads(start: Start) -> None:
    worker = start("--concurrency", "4")
    wait_until(WorkerSeen.objects.exists, "the worker beats")
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(200)], "linger", seconds=0)
    counts: list[int] = []
    wait_until(lambda: counts.append(len(sessions())) or are_settled(), "all are settled")  # type: ignore[func-returns-value]
    wait_until(lambda: len(sessions()) == 4 + 3, "each thread has its connection")
    assert max(counts) <= 4 + 3
    assert "of them" not in worker.stop()


def test_a_worker_leaves_a_demoted_primary_that_keeps_its_connections(own_database: OwnDatabase, start: Start) -> None:
    """The sessions that are open become read-only; new ones are not, as behind an address that moved."""
    worker = start(**own_database.environment)
    fire_some(20)
    with connection.cursor() as cursor:
        cursor.execute("ALTER ROLE delayq SET default_transaction_read_only = off")
        cursor.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        cursor.execute("SELECT pg_reload_conf()")
    connection.close()
    fire_some(45)
    beat = WorkerSeen.objects.get().seen_at
    wait_until(lambda: WorkerSeen.objects.get().seen_at > beat, "the heartbeat reconnected")
    worker.stop()


def sessions() -> set[int]:
    """The server's numbers of the connections that others than this test have to its database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return {number for (number,) in cursor.fetchall()}
