"""Clocks that are wrong by minutes, and set while everything runs: never early by the database's, and hardly late."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.db import connection, transaction

from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine
from django_delayq.sql.now import database_now
from tests.e2e.outages.conftest import once
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, due_orders
from tests.testapp.models import Effect, Order
from tools.moved_clock import OFFSET

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True)]
TEN = timedelta(minutes=10)


SOURCE = Path(__file__).with_name("shifted_clock.c")


class ShiftedClock:
    """A clock for other processes: `environment` is what they are to be started with."""

    def __init__(self, ahead: timedelta = timedelta(0)) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="delayq-clock-")
        self._file = Path(self._folder.name, "ahead")
        self.environment = {"LD_PRELOAD": str(library()), "SHIFTED_CLOCK": str(self._file)}
        self._file.write_bytes(bytes(8))
        self.set(ahead)

    def set(self, ahead: timedelta) -> None:
        """From now on it is so far ahead of the one of this process; negative: behind."""
        ahead += timedelta(seconds=int(os.environ.get(OFFSET, "0")))  # on another day, whose library this one replaces
        with self._file.open("r+b", buffering=0) as file:  # in place: the processes read this page
            file.write(struct.pack("=q", ahead // timedelta(microseconds=1)))

    def close(self) -> None:
        self._folder.cleanup()


@functools.cache
def library() -> Path:
    """Return the library to preload, compiled once. Without a compiler, skip the test; fail it with `CI=true`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.uname().sysname != "Linux":
        words = "clocks are shifted with a C compiler, on Linux"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    made = Path(tempfile.mkdtemp(prefix="delayq-clock-")) / "shifted_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, SOURCE], check=True)
    return made


@pytest.fixture
def shifted() -> Iterator[ShiftedClock]:
    made = ShiftedClock()
    yield made
    made.close()


@pytest.fixture
def shifted_redis(shifted: ShiftedClock, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisProcess]:
    """Yield a Redis server with the clock `shifted`."""
    with monkeypatch.context() as patch:
        for name, value in shifted.environment.items():
            patch.setenv(name, value)
        server = RedisProcess()
        server.start()
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": server.url, "SWEEP_INTERVAL": timedelta(seconds=1)}
    yield server
    forget_engine()
    server.stop()


@pytest.fixture
def worker() -> Iterator[Callable[[], RunningWorker]]:
    started: list[RunningWorker] = []

    def start() -> RunningWorker:
        started.append(RunningWorker())
        return started[-1]

    yield start
    for running in started:
        running.stop()


def fired(rows: list[Timeout]) -> bool:
    return Timeout.objects.filter(pk__in=[row.pk for row in rows], state="fired").count() == len(rows)


def assert_none_early() -> None:
    """By the database's clock, which also writes down when a row was settled."""
    for due_at, settled_at in Timeout.objects.filter(state="fired").values_list("due_at", "settled_at"):
        assert settled_at is not None
        assert settled_at >= due_at
    assert Effect.objects.count() == Timeout.objects.filter(state="fired").count()


def asked(server: RedisProcess) -> int:
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("evalsha", "eval"))


@once
@pytest.mark.parametrize(
    ("shift", "is_from_the_start"), [(TEN, False), (-TEN, True)], ids=["set", "wrong_from_the_start"]
)
def test_redis_whose_clock_is_set_makes_nothing_early_and_nothing_late_by_as_much(
    shifted: ShiftedClock,
    shifted_redis: RedisProcess,
    worker: Callable[[], RunningWorker],
    shift: timedelta,
    is_from_the_start: bool,
) -> None:
    began = database_now("default")
    if is_from_the_start:
        shifted.set(shift)
    later = due_orders("remind", 20, minutes=5)
    due = due_orders("remind", 5, seconds=3)
    worker()
    first = due_orders("remind", 3)
    wait_until(lambda: fired(first))
    shifted.set(shift)
    due += due_orders("remind", 5, seconds=2)
    wait_until(lambda: fired(due), seconds=60)
    shifted.set(timedelta(0))
    due = due_orders("remind", 5, seconds=1)
    wait_until(lambda: fired(due), seconds=60)
    assert_none_early()
    assert Timeout.objects.filter(pk__in=[row.pk for row in later], state="pending").count() == 20
    seconds = (database_now("default") - began).total_seconds()
    assert asked(shifted_redis) <= 150 + 20 * seconds, "entries that only seem due must not be reserved repeatedly"


SCHEDULE = """
from datetime import timedelta
from django_delayq import schedule_timeout
from tests.testapp.models import Order
for minutes in (0, 10):
    schedule_timeout(Order.objects.create(status="new"), "remind", minutes=minutes, key=str(minutes))
"""


@once
@pytest.mark.parametrize("shift", [TEN, -TEN], ids=["ahead", "behind"])
@pytest.mark.usefixtures("redis_client")
def test_an_application_whose_clock_is_wrong_moves_its_deadlines_and_none_fires_before_what_its_row_says(
    shifted: ShiftedClock,
    start_command: Callable[..., subprocess.Popen[bytes]],
    worker: Callable[[], RunningWorker],
    shift: timedelta,
) -> None:
    shifted.set(shift)
    worker()
    before = database_now("default")
    assert start_command("shell", "-v0", "-c", SCHEDULE, env=shifted.environment).wait(60) == 0
    after = database_now("default")
    deadlines = {row.key: row.due_at for row in Timeout.objects.all()}
    for minutes in (0, 10):
        moved = shift + timedelta(minutes=minutes)
        slack = timedelta(seconds=1)
        assert before + moved - slack <= deadlines[str(minutes)] <= after + moved + slack
    now_due = due_orders("remind", 1)
    overdue = list(Timeout.objects.filter(due_at__lte=after))
    assert len(overdue) == (2 if shift < timedelta(0) else 0)
    wait_until(lambda: fired([*now_due, *overdue]))
    assert_none_early()
    assert Timeout.objects.filter(state="pending").count() == 2 - len(overdue)
    forget_engine()


@pytest.mark.parametrize(("source", "shift"), [("redis", -TEN), ("ledger", TEN)])
@pytest.mark.usefixtures("redis_client")
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no clock but its process's")
def test_a_worker_whose_clock_is_wrong_fires_by_the_databases(
    shifted: ShiftedClock, start_command: Callable[..., subprocess.Popen[bytes]], shift: timedelta, source: str
) -> None:
    shifted.set(shift)
    variables = {"DELAYQ_TEST_WITHOUT_REDIS": "1"} if source == "ledger" else {}
    variables["DELAYQ_TEST_SECONDS"] = '{"SWEEP_INTERVAL": 1}'
    due = due_orders("remind", 5)
    later = due_orders("remind", 5, minutes=5)
    start_command("delayq_worker", "--processes", "1", env={**shifted.environment, **variables})
    wait_until(lambda: fired(due), seconds=60)
    due = due_orders("remind", 5, seconds=1) + due_orders("send_outside", 2, seconds=1)
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=due[0].object_id)
        wait_until(lambda: fired(due[1:]), seconds=60)
    wait_until(lambda: fired(due), seconds=60)
    assert_none_early()
    assert set(Timeout.objects.filter(state="fired").values_list("attempts", flat=True)) == {1}
    assert Timeout.objects.filter(pk__in=[row.pk for row in later], state="pending").count() == 5
    assert Order.objects.count() == 17
    assert _written_by_that_clock(shift)
    forget_engine()


def _written_by_that_clock(shift: timedelta) -> bool:
    """Check that the clock of the worker was wrong: its handlers recorded their current time."""
    wrote: list[datetime] = list(Effect.objects.values_list("at", flat=True))
    return all(abs(at - database_now("default") - shift) < timedelta(minutes=3) for at in wrote)
