"""SQLite as it comes: a web process and a worker that write at once hear of no locked database, and one survives it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import OperationalError, connection, transaction

import django_delayq as dq
from django_delayq.models import Timeout
from tests.conftest import ROOT
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order
from tools import processes

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
        "DELAYQ_TEST_SECONDS": json.dumps({"LEASE": 2, "SWEEP_INTERVAL": 0.2}),
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
def worker_log(plain_file: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """Run a worker until the test ends; yield its log. It must stop gracefully."""
    log = tmp_path / "worker.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "django", "delayq_worker", "-v0", "--log-level", "warning"]
        worker = processes.start(command, env=plain_file, cwd=ROOT, stdout=output, stderr=output)
    try:
        yield log
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0, log.read_text()
    finally:
        processes.kill(worker)


def test_with_djangos_defaults_nobody_finds_the_database_locked(worker_log: Path) -> None:
    for number in range(60):
        with transaction.atomic():
            order = Order.objects.create(status="new")
            dq.schedule_timeout(order, "remind", seconds=0)
        if number % 3 == 0:
            dq.schedule_timeout(order, "remind", seconds=0, key="second")
            dq.cancel_timeout(order, "remind", key="third")
    wait_until(lambda: not Timeout.objects.unsettled().exists(), "all have fired")
    assert "locked" not in worker_log.read_text()
    each_fired_once(80)


def test_a_worker_survives_a_writer_that_takes_longer_than_it_waits(worker_log: Path) -> None:
    order = Order.objects.create(status="new")
    dq.schedule_timeout(order, "remind", seconds=0)
    wait_until(lambda: Effect.objects.exists(), "the worker works")
    dq.schedule_timeout(order, "remind", seconds=0)
    with connection.cursor() as cursor:
        cursor.execute("BEGIN EXCLUSIVE")
        wait_until(lambda: "locked" in worker_log.read_text(), "the worker has found it locked")
        cursor.execute("ROLLBACK")
    wait_until(lambda: not Timeout.objects.unsettled().exists(), "all have fired")
    assert len(worker_log.read_text().splitlines()) < 20
    each_fired_once(2)


def each_fired_once(count: int) -> None:
    fired = Timeout.objects.filter(state=Timeout.State.FIRED, attempts=1).values_list("pk", flat=True)
    assert len(fired) == Timeout.objects.count() == count
    assert Counter(Effect.objects.values_list("timeout_id", flat=True)) == Counter(fired)


def remind_at_once() -> bool:
    """Return false if the worker, whose file is the former one, has just removed a journal that has the same name."""
    try:
        dq.schedule_timeout(Order.objects.create(status="new"), "remind", seconds=0)
    except OperationalError as error:
        if "disk I/O error" not in str(error):
            raise
        connection.close()
        return False
    return True


def test_a_worker_notices_that_the_file_was_replaced(plain_file: dict[str, str], worker_log: Path) -> None:
    """As a restore does it. The former file exists as long as it is open, and nothing else shows that it is dead."""
    dq.schedule_timeout(Order.objects.create(status="new"), "remind", seconds=0)
    wait_until(lambda: not Timeout.objects.unsettled().exists(), "it is at work")
    connection.close()
    file = Path(plain_file["DELAYQ_TEST_DB_NAME"])
    shutil.copy(file, file.with_suffix(".copy"))
    file.with_suffix(".copy").replace(file)
    for _ in range(2):
        wait_until(remind_at_once, "it is scheduled in the new file")
        wait_until(lambda: not Timeout.objects.unsettled().exists(), "it is at work in the new file")
    assert worker_log.read_text().count("was replaced") == 1
