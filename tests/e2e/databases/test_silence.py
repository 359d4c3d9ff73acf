"""The connections to the database stop answering, and refuse nothing. The worker continues, or ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import connection, transaction

import django_delayq as dq
from django_delayq.ledger.db_connections import IDLE_SECONDS
from django_delayq.models import Timeout, WorkerSeen
from tests.e2e.databases.conftest import OwnDatabase
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server"),
]
Start = Callable[..., tuple["subprocess.Popen[bytes]", Path]]
SECONDS = {"LEASE": 60, "SWEEP_INTERVAL": 1}


@pytest.fixture
def start(own_database: OwnDatabase, start_command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> Start:
    """Start a worker, and wait until it has fired a timeout; returns it and its log. Keywords: its environment."""
    log = tmp_path / "worker.log"

    def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        environment = {**own_database.environment, "DELAYQ_TEST_SECONDS": json.dumps(SECONDS), **environment}
        with log.open("wb") as output:
            command = ("delayq_worker", "--processes", "1", "-v0", "--log-level", "warning", *arguments)
            worker = start_command(*command, env=environment, stdout=output, stderr=output)
        dq.schedule_timeout(Order.objects.create(status="new"), "linger", seconds=0)
        wait_until(lambda: WorkerSeen.objects.exists() and are_settled(), "it has fired one")
        return worker, log

    return start


def are_settled() -> bool:
    return not Timeout.objects.unsettled().exists()


def test_a_quiet_worker_fires_soon_although_its_connections_were_forgotten(
    start: Start, own_database: OwnDatabase
) -> None:
    """The test of an idle connection must not wait as long as the driver does, which is without end."""
    worker, log = start("--concurrency", "1")
    time.sleep(IDLE_SECONDS + 1)  # only a connection that was idle is tested
    own_database.proxy.forget()
    dq.schedule_timeout(Order.objects.create(status="new"), "linger", seconds=0)
    began = time.monotonic()
    wait_until(are_settled, "it has fired the other one, too", seconds=60)
    assert "database_silent" not in log.read_text()
    assert time.monotonic() - began < 30, "it has not waited for the driver"
    worker.terminate()
    assert worker.wait(60) == 0, log.read_text()


def test_a_worker_without_redis_gives_up_a_poll_that_is_never_answered(start: Start, own_database: OwnDatabase) -> None:
    worker, log = start("--concurrency", "1", "--log-format", "json", DELAYQ_TEST_WITHOUT_REDIS="1")
    own_database.proxy.forget()
    dq.schedule_timeout(Order.objects.create(status="new"), "linger", seconds=0)
    wait_until(are_settled, "it has fired the other one, too", seconds=60)
    assert '"event": "database_silent"' in log.read_text()
    worker.terminate()
    assert worker.wait(60) == 0, log.read_text()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_second_signal_ends_a_worker_that_waits_for_a_silent_database(
    processes: str, start: Start, own_database: OwnDatabase
) -> None:
    worker, log = start("--processes", processes, DELAYQ_TEST_WITHOUT_REDIS="1")
    own_database.proxy.swallow()
    time.sleep(2.0)  # both main loops poll once a second
    worker.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(1)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 1, log.read_text()
    assert "has not come on" in log.read_text()


def test_a_worker_outlives_a_lock_on_the_ledger_and_logs_what_it_waits_for(start: Start) -> None:
    worker, log = start("--concurrency", "1", DELAYQ_TEST_WITHOUT_REDIS="1")
    order = Order.objects.create(status="new")
    with locked_ledger():
        wait_until(lambda: "lock on a table" in log.read_text(), "it is logged", seconds=60)
    dq.schedule_timeout(order, "linger", seconds=0)
    wait_until(are_settled, "it has fired the other one, too", seconds=60)
    worker.terminate()
    assert worker.wait(60) == 0, log.read_text()
    assert len(re.findall("waited for the database", log.read_text())) < 10


class locked_ledger:  # noqa: N801
    """Lock the table as a migration does."""

    def __enter__(self) -> None:
        table = connection.ops.quote_name(Timeout._meta.db_table)
        if connection.vendor == "postgresql":
            self._atomic = transaction.atomic()
            self._atomic.__enter__()
            connection.cursor().execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        else:
            connection.cursor().execute(f"LOCK TABLES {table} WRITE")

    def __exit__(self, *_: object) -> None:
        if connection.vendor == "postgresql":
            self._atomic.__exit__(None, None, None)
        else:
            connection.cursor().execute("UNLOCK TABLES")
