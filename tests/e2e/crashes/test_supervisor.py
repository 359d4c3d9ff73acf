"""`delayq_worker --processes`: the processes are stopped with their supervisor, and started again when they die."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_delayq.models import Timeout, WorkerSeen
from tests.support.processes import StartWorker, due_now, effects, settled, states
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes"),
]

two_writers = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="on SQLite a handler holds the whole database; others are as PostgreSQL"
)


def children(supervisor: subprocess.Popen[bytes]) -> set[int]:
    """Return the ids of the worker processes."""
    path = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
    return {int(pid) for pid in path.read_text().split()} if path.exists() else set()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def is_handling() -> bool:
    """Return whether a handler runs, which has locked its object."""
    with transaction.atomic():
        return len(Order.objects.select_for_update(skip_locked=True)) < Order.objects.count()


def start(start_worker: StartWorker, *arguments: str, **variables: Any) -> subprocess.Popen[bytes]:
    """Start a supervisor with two processes of one thread each, and wait until both have begun."""
    started = start_worker("--processes", "2", "--concurrency", "1", *arguments, **variables)
    wait_until(lambda: WorkerSeen.objects.count() == 2, "both processes have begun")
    return started


@pytest.mark.dialect
@two_writers
def test_a_signal_ends_all_processes_after_their_handlers(start_worker: StartWorker) -> None:
    """Terminals and systemd send it to the whole group: it counts once for each process, and aborts no handler."""
    supervisor = start(start_worker, LINGER="2")
    pids = children(supervisor)
    assert len(pids) == 2
    rows = due_now("linger", 2)
    wait_until(is_handling, "a handler is running")
    os.killpg(supervisor.pid, signal.SIGINT)
    assert supervisor.wait(30) == 0
    assert not any(map(is_alive, pids))
    assert not WorkerSeen.objects.exists()
    assert set(effects("linger").values()) <= {1}
    assert Timeout.objects.filter(pk__in=[row.pk for row in rows], state="firing").count() == 0


@pytest.mark.dialect
@two_writers
def test_a_second_signal_aborts_the_handlers(start_worker: StartWorker) -> None:
    supervisor = start(start_worker, LINGER="60")
    pids = children(supervisor)
    due_now("linger", 2)
    wait_until(is_handling, "a handler is running")
    supervisor.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        supervisor.wait(1)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(20) == 1
    assert not any(map(is_alive, pids))
    assert states() == {"pending": 2}


def test_a_suspended_process_is_killed_after_a_lease(start_worker: StartWorker) -> None:
    supervisor = start(start_worker, seconds={"LEASE": 2}, stderr=subprocess.PIPE)
    pids = children(supervisor)
    for each, number in ((min(pids), signal.SIGSTOP), (max(pids), signal.SIGSTOP), (max(pids), signal.SIGCONT)):
        os.kill(each, number)
    supervisor.send_signal(signal.SIGTERM)
    wait_until(lambda: max(pids) not in children(supervisor), "the other one has ended")
    _, log = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 1
    assert f"(pid {min(pids)}) is to stop, but has been suspended" in log.decode()
    assert not any(map(is_alive, pids))


def test_a_process_that_is_killed_is_started_again_and_ends_when_the_supervisor_is_killed(
    start_worker: StartWorker,
) -> None:
    supervisor = start(start_worker, stderr=subprocess.PIPE)
    before = children(supervisor)
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(children(supervisor) - before) == 1, "another process has begun")
    assert len(children(supervisor) & before) == 1
    rows = due_now("remind", 20)
    wait_until(settled(20), "all have fired")
    assert effects("remind") == {row.pk: 1 for row in rows}
    pids = children(supervisor)
    wait_until(lambda: WorkerSeen.objects.filter(pid__in=pids).count() == 2, "both have begun")
    supervisor.kill()
    log = supervisor.communicate(timeout=30)[1].decode()
    wait_until(lambda: not any(map(is_alive, pids)), "both have ended")
    assert "Traceback" not in log
    assert not WorkerSeen.objects.filter(pid__in=pids).exists(), "they have stopped as after SIGTERM"
