"""Each promised bound on lateness holds, with an allowance of six times the bound for a slow machine.

A recovery that takes ten times as long as promised fails here; the other suites only wait until it has happened. The
bounds are those of docs/guarantees.md. Lateness is measured by the database: `settled_at` against the promised time.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_delayq import schedule_timeout
from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from tests.e2e.outages.wire import Wire
from tests.engine.redis_process import RedisProcess
from tests.support.processes import StartWorker, due_now, effects, end, settled
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]
ALLOWANCE = 6
LEASE, SWEEP = 2.0, 2.0
SECONDS = {"LEASE": LEASE, "SWEEP_INTERVAL": SWEEP}
RARE_SWEEPS = {"LEASE": 60.0, "SWEEP_INTERVAL": 60.0}


def soon(count: int, seconds: float) -> list[Timeout]:
    """Schedule timeouts of new orders through the public interface, due in so many seconds."""
    orders = [Order.objects.create(status="new") for _ in range(count)]
    return [schedule_timeout(order, "remind", seconds=seconds) for order in orders]


def assert_within(bound: float, since: datetime | None, rows: list[Timeout]) -> None:
    """Check that `rows` settled within `bound` seconds, times the allowance, of `since` or of their deadlines."""
    late = []
    for row in Timeout.objects.filter(pk__in=[row.pk for row in rows]):
        assert row.settled_at is not None
        late.append((row.settled_at - (since or row.due_at)).total_seconds())
    assert max(late) <= ALLOWANCE * bound, f"promised within {bound:g} s, took {max(late):.2f} s"


def at_work(worker: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Wait until `worker`, the only one, has fired something."""
    rows = due_now("remind")
    wait_until(lambda: effects("remind").keys() >= {row.pk for row in rows}, "the worker fires")
    return worker


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor == "sqlite", reason="a stopped SQLite process may hold the only write lock")
def test_after_a_kill_the_other_worker_fires_within_a_lease_and_a_second(start_worker: StartWorker) -> None:
    heir = at_work(start_worker(seconds=SECONDS))
    heir.send_signal(signal.SIGSTOP)  # so that the other worker gets the next timeouts
    doomed = start_worker(seconds=SECONDS, KILL_AT="handled")
    rows = due_now("remind", 3)
    assert doomed.wait(90) == -signal.SIGKILL
    killed_at = database_now("default")
    heir.send_signal(signal.SIGCONT)
    wait_until(settled(4), "the other worker has fired the rest")
    assert_within(LEASE + 1, killed_at, rows)


def test_what_redis_lost_or_was_never_told_of_fires_within_a_sweep_and_what_is_due_later_is_not_late(
    start_worker: StartWorker, redis_client: Any, prefix: str
) -> None:
    """A timeout of a transaction that commits after its deadline fires within a sweep, too."""
    worker = at_work(start_worker(seconds=SECONDS))
    with transaction.atomic():
        committed_late, began = soon(3, 0.0), database_now("default")
        wait_until(lambda: database_now("default") - began > timedelta(seconds=1), "the deadline has passed")
    committed_at = database_now("default")
    wait_until(settled(4), "they have fired")
    assert_within(SWEEP, committed_at, committed_late)
    next_rows, later_rows = soon(5, 1.0), soon(5, 3 * SWEEP)
    redis_client.delete(*redis_client.scan_iter(match=f"{prefix}*"))
    next_rows += due_now("remind", 5)
    wait_until(settled(19), "all have fired")
    assert_within(SWEEP, None, next_rows)
    assert_within(1, None, later_rows)
    end(worker)
    assert [*effects("remind").values()] == [1] * 19


@pytest.mark.parametrize("make_it", [RedisProcess.kill, RedisProcess.pause], ids=["down", "silent"])
def test_while_redis_does_not_answer_due_timeouts_fire_within_two_seconds(
    start_worker: StartWorker, make_it: Callable[[RedisProcess], object]
) -> None:
    with RedisProcess() as server:
        worker = at_work(start_worker(seconds=SECONDS, REDIS_URL=server.url))
        make_it(server)
        rows = soon(5, 3.0)
        wait_until(settled(6), "they have fired without an answer of Redis")
        assert_within(2, None, rows)
        end(worker)
    assert [*effects("remind").values()] == [1] * 6


def test_with_a_silently_dead_subscription_a_timeout_is_at_most_a_second_late(
    start_worker: StartWorker, redis_client: Any
) -> None:
    """No sweep helps within the minute: the worker must ask Redis although no call arrives."""
    with Wire(redis_client.connection_pool.connection_kwargs["port"]) as wire:
        at_work(start_worker(seconds=RARE_SWEEPS, REDIS_URL=wire.url))
        rows = soon(5, 0.0)
        wait_until(settled(6), "the worker was woken")
        wire.go_silent_to_subscribers()
        rows += soon(5, 0.0)
        wait_until(settled(11), "the worker has asked by itself")
        assert wire.dropped, "Redis has called, and the call was lost"
        assert_within(1, None, rows)


def test_without_redis_a_timeout_is_at_most_a_second_late(start_worker: StartWorker) -> None:
    at_work(start_worker(seconds=SECONDS, WITHOUT_REDIS="1"))
    rows = soon(5, 2.0)
    wait_until(settled(6), "the poll has found them")
    assert_within(1, None, rows)
