"""SQLite as it comes: a web process and a worker that write at once hear of no locked database, and one survives it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection, transaction

import django_delayq as dq
from tests.conftest import ROOT
from tests.e2e.databases.conftest import Start, are_settled, each_fired_once
from tests.support.processes import LoggedWorker
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite"),
]


@pytest.fixture
def plain_file(child_environment: dict[str, str], transactional_db: None, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Create a database with Django's defaults for this process; yield the environment for others."""
    file = tmp_path / "plain.sqlite3"
    environment = {
        **child_environment,
        "DJANGO_SETTINGS_MODULE": "tests.e2e.databases.sqlite_settings",
        "DELAYQ_TEST_DB_NAME": str(file),
        "DELAYQ_TEST_WITHOUT_REDIS": "1",
    }
    migrate = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"]
    subprocess.run(migrate, env=environment, cwd=ROOT, check=True)
    before = {name: connection.settings_dict[name] for name in ("NAME", "OPTIONS")}
    connection.close()
    connection.settings_dict.update(NAME=str(file), OPTIONS={})
    yield environment
    connection.close()
    connection.settings_dict.update(before)


@pytest.fixture
def worker(plain_file: dict[str, str], start: Start) -> Iterator[LoggedWorker]:
    """Run a worker until the test ends. It must stop gracefully."""
    worker = start(seconds={"LEASE": 2.0, "SWEEP_INTERVAL": 0.2}, **plain_file)
    yield worker
    worker.stop()


def test_with_djangos_defaults_nobody_finds_the_database_locked_but_by_a_writer_that_takes_too_long(
    worker: LoggedWorker,
) -> None:
    order = Order.objects.create(status="new")
    for number in range(60):
        with transaction.atomic():
            order = Order.objects.create(status="new")
            dq.schedule_timeout(order, "remind", seconds=0)
        if number % 3 == 0:
            dq.schedule_timeout(order, "remind", seconds=0, key="second")
            dq.cancel_timeout(order, "remind", key="third")
    wait_until(are_settled, "all have fired")
    assert not worker.has_logged("locked")
    dq.schedule_timeout(order, "remind", seconds=0)
    with connection.cursor() as cursor:
        cursor.execute("BEGIN EXCLUSIVE")
        wait_until(lambda: worker.has_logged("locked"), "the worker has found it locked")
        cursor.execute("ROLLBACK")
    wait_until(are_settled, "all have fired")
    assert len(worker.text.splitlines()) < 20
    assert each_fired_once() == 81
