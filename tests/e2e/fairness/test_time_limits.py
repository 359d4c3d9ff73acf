"""Handlers that never end are abandoned: other policies are on time, no lock remains, and no process grows."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_delayq import schedule_timeout
from django_delayq.models import Timeout, WorkerSeen
from tests.settings import DB
from tests.support.processes import StartWorker, end, memory_mb
from tests.support.waiting import wait_until
from tests.testapp.models import Order, Parcel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.django_db(transaction=True)]

# With SQLite a handler inside a transaction holds the whole database.
MODES = ["hang_outside"] if DB == "sqlite" else ["hang", "hang_outside", "hang_many", "ahang"]
LIMIT_SECONDS = 2.0
MOST_LATE = timedelta(seconds=3 * LIMIT_SECONDS)
"""All that hang, one after the other on these threads, would delay others by at least four times the limit. On an idle
machine none is later than 3 s; `pytest -s` shows the latest one."""
QUICK = 200
MAX_STUCK = 16
"""Four times the threads of the worker."""
OWN_THREADS = 24
"""Its handler threads, those beside them, those that run limited works, and the timer of each test of a connection."""


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=500) as server:
        host, port = server.getsockname()
        yield f"{host}:{port}"


@pytest.fixture
def hanging(declare: Callable[..., Any]) -> Callable[[str, int], None]:
    """Schedule so many timeouts, due now, whose handlers hang in the worker."""
    declared: dict[str, Any] = {}

    def schedule(name: str, count: int) -> None:
        policy = declared.get(name) or declared.setdefault(name, declare(Order, name=name))
        for _ in range(count):
            schedule_timeout(Order.objects.create(), policy, seconds=0)

    return schedule


def stuck() -> int:
    return sum(WorkerSeen.objects.values_list("stuck_threads", flat=True))


def test_handlers_that_hang_in_each_mode_delay_others_by_their_limit_at_most(
    start_worker: StartWorker, source: dict[str, str], hanging: Callable[[str, int], None], silent: str
) -> None:
    for name in MODES:
        hanging(name, 2)
    parcels = [Parcel.objects.create() for _ in range(QUICK)]
    seconds = {"LEASE": 9.0, "SWEEP_INTERVAL": 1.0}
    variables = {"POLICIES": " ".join(MODES), "SILENT": silent, "LIMIT": str(LIMIT_SECONDS), **source}
    worker = start_worker("--concurrency", "4", seconds=seconds, **variables)
    wait_until(WorkerSeen.objects.exists, "the worker runs")
    for number, parcel in enumerate(parcels):
        schedule_timeout(parcel, "chase", seconds=8 * number / QUICK)
    hung = Timeout.objects.exclude(policy__endswith=".chase")
    quick = Timeout.objects.filter(policy__endswith=".chase")
    wait_until(lambda: quick.filter(state="fired").count() == QUICK, "the quick ones have fired")
    late = [settled_at - due_at for due_at, settled_at in quick.values_list("due_at", "settled_at") if settled_at]
    sys.stdout.write(f"{max(late).total_seconds():.2f} s late at most\n")
    assert max(late) < MOST_LATE
    wait_until(lambda: hung.filter(state="dead").count() == 2 * len(MODES), "the hanging ones are dead")
    for row in hung:
        assert (row.attempts, {each["error"] for each in row.errors}) == (2, {"TimeLimitExceeded"})
    with transaction.atomic():
        nowait = connection.features.has_select_for_update_nowait
        assert len(Order.objects.select_for_update(nowait=nowait)) == 2 * len(MODES), "no lock remains"
    # Cancelled coroutines leave none; the batch leaves one more for each of the two times that it hung as a whole.
    stuck_in = {"hang": 4, "hang_outside": 4, "hang_many": 4, "ahang": 0}
    least = sum(stuck_in[name] for name in MODES)
    wait_until(lambda: least <= stuck() <= least + 2 * ("hang_many" in MODES), "the worker counts its stuck threads")
    end(worker)


def threads_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("Threads:")[1].split()[0])


def test_processes_whose_threads_are_stuck_are_replaced_and_none_of_them_grows(
    start_worker: StartWorker, hanging: Callable[[str, int], None], silent: str
) -> None:
    hanging("hang_outside", 50)
    worker = start_worker(
        "--processes", "2", "--concurrency", "4",
        POLICIES="hang_outside", SILENT=silent, LIMIT="0.3", WITHOUT_REDIS="1",
    )  # fmt: skip
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
    most: dict[int, tuple[int, float]] = {}

    def is_over() -> bool:
        for pid in map(int, children.read_text().split()):
            try:
                threads, memory = most.get(pid, (0, 0.0))
                most[pid] = max(threads, threads_of(pid)), max(memory, memory_mb(pid))
            except (OSError, IndexError):  # it has just ended
                continue
        return Timeout.objects.filter(state="dead", attempts=2).count() == 50

    wait_until(is_over, "a hundred attempts have hung", seconds=180)
    assert len(most) > 2, "processes were replaced"
    assert max(threads for threads, _ in most.values()) <= MAX_STUCK + OWN_THREADS
    first = min(memory for _, memory in most.values())
    assert max(memory for _, memory in most.values()) < first + 40
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) in {0, 1}
