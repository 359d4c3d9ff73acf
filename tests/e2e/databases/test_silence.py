"""The connections to the database stop answering, and refuse nothing. The worker continues, or ends."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection, transaction

import django_delayq as dq
from django_delayq.ledger.db_connections import IDLE_SECONDS
from django_delayq.models import Timeout, WorkerSeen
from tests.e2e.databases.conftest import OwnDatabase, Start, are_settled, fire_some
from tests.support.processes import LoggedWorker
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server"),
]


@pytest.fixture
def begin(own_database: OwnDatabase, start: Start) -> Start:
    """Start a worker on the test's own server, and wait until it has fired a timeout."""

    def begin(*arguments: str, **environment: str) -> LoggedWorker:
        seconds = {"LEASE": 60.0, "SWEEP_INTERVAL": 1.0}
        worker = start(*arguments, seconds=seconds, **{**own_database.environment, **environment})
        dq.schedule_timeout(Order.objects.create(status="new"), "linger", seconds=0)
        wait_until(lambda: WorkerSeen.objects.exists() and are_settled(), "it has fired one")
        return worker

    return begin


def test_a_quiet_worker_fires_soon_although_its_connections_were_forgotten(
    begin: Start, own_database: OwnDatabase
) -> None:
    """The test of an idle connection must not wait as long as the driver does, which is without end."""
    worker = begin("--concurrency", "1")
    time.sleep(IDLE_SECONDS + 1)  # only a connection that was idle is tested
    own_database.proxy.forget()
    began = time.monotonic()
    fire_some()
    assert not worker.has_logged("database_silent")
    assert time.monotonic() - began < 30, "it has not waited for the driver"
    worker.stop()


def test_a_worker_without_redis_outlives_a_locked_ledger_and_a_silent_database_and_ends_at_a_second_signal(
    begin: Start, own_database: OwnDatabase
) -> None:
    worker = begin("--processes", "2", "--log-format", "json", DELAYQ_TEST_WITHOUT_REDIS="1")
    with locked_ledger():
        wait_until(lambda: worker.has_logged("lock on a table"), "what it waits for is logged", seconds=60)
    fire_some()
    own_database.proxy.forget()
    fire_some()
    assert worker.has_logged('"event": "database_silent"')
    own_database.proxy.swallow()
    time.sleep(2.0)  # both main loops poll once a second
    worker.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(1)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(30) == 1, worker.text
    assert worker.has_logged("has not come on")


@contextmanager
def locked_ledger() -> Iterator[None]:
    """Lock the table as a migration does."""
    table = connection.ops.quote_name(Timeout._meta.db_table)
    if connection.vendor == "postgresql":
        with transaction.atomic():
            connection.cursor().execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield
    else:
        connection.cursor().execute(f"LOCK TABLES {table} WRITE")
        yield
        connection.cursor().execute("UNLOCK TABLES")
