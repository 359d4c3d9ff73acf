"""The database goes away under a worker, in every way: it lives on, quietly, and each timeout has its effect once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from django.db import connection

import django_delayq as dq
from tests.e2e.databases.conftest import OwnDatabase, Start, are_settled, each_fired_once
from tests.support.processes import processor_seconds
from tests.support.waiting import wait_until
from tests.support.workers import cut_all_other_connections
from tests.testapp.models import Effect, Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server"),
]
COUNT, SECONDS = 120, {"LEASE": 2.0, "SWEEP_INTERVAL": 1.0}
LONGEST_LOG = 160
"""Ten outages, each with a line at its beginning and one at its end from the main loop, four threads and three jobs."""


def test_a_worker_outlives_restarts_cut_connections_and_lost_answers(own_database: OwnDatabase, start: Start) -> None:
    own_database.stop()
    worker = start("-v1", seconds=SECONDS, **own_database.environment)
    wait_until(lambda: worker.has_logged("is asked again soon"), "it begins, and misses the database")
    own_database.start()
    wait_until(lambda: worker.has_logged("  database  "), "it shows its first screen")
    fire_some_and_meanwhile(lambda: restart(own_database))
    fire_some_and_meanwhile(lambda: restart(own_database, at_once=True))
    for _ in range(3):
        fire_some_and_meanwhile(cut_all_other_connections)
    lost = own_database.proxy.lost
    for _ in range(3):
        fire_some_and_meanwhile(own_database.proxy.lose_next_reply)
    assert own_database.proxy.lost > lost
    burnt = seconds_of_work_during_an_outage(own_database, worker.process.pid)
    fire_some_and_meanwhile(lambda: None)
    lines = worker.stop().splitlines()
    assert len(lines) < LONGEST_LOG, lines
    assert burnt < 3, "it does not ask the whole time"


def fire_some_and_meanwhile(break_something: Callable[[], object]) -> None:
    """Run many handlers that take their time, in the middle of which something breaks; in the end all have run once."""
    before = Effect.objects.count()
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(COUNT)], "linger", seconds=0)
    wait_until(lambda: Effect.objects.count() > before + 5, "some have fired")
    break_something()
    wait_until(are_settled, "all are settled")
    each_fired_once()


def restart(own_database: OwnDatabase, *, at_once: bool = False) -> None:
    own_database.stop(at_once=at_once)
    own_database.start()


def seconds_of_work_during_an_outage(own_database: OwnDatabase, pid: int, seconds: float = 6.0) -> float:
    """How much processor time the worker used while there was no database."""
    own_database.stop()
    before = processor_seconds(pid)
    time.sleep(seconds)  # not to wait for anything: this is how long it is away
    burnt = processor_seconds(pid) - before
    own_database.start()
    return burnt
