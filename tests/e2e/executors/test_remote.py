"""Timeouts in the processes of Celery, RQ and django-tasks: whatever fails, none is lost and none fires twice."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from django_delayq.models import Timeout
from tests.e2e.executors.conftest import Engine
from tests.support.processes import due_now, effects, end, is_stopped, settled, states
from tests.support.waiting import wait_until
from tools import processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]
DUE = int(os.environ.get("DELAYQ_TEST_DUE", "200"))
of_celery = pytest.mark.parametrize("engine", ["celery"], indirect=True)
"""What becomes of a message is the business of the worker, whichever library has sent it."""
Start = Callable[..., "subprocess.Popen[bytes]"]


def test_many_fire_in_groups_in_batches_and_outside_a_transaction(
    engine: Engine, start_worker: Start, start_remote: Start
) -> None:
    """`DELAYQ_TEST_DUE=10000` tests more."""
    rows = due_now("remind", DUE) + due_now("remind_many", 30) + due_now("send_outside", 2)
    start_remote()
    worker = start_worker()
    wait_until(settled(len(rows)), seconds=150)
    end(worker)
    assert states() == {"fired": len(rows)}
    fired = {**effects("remind"), **effects("remind_many"), **effects("send_outside")}
    assert fired == {row.pk: 1 for row in rows}


@pytest.mark.usefixtures("engine", "short_lease")
def test_a_process_is_killed_in_the_middle(start_worker: Start, start_remote: Start) -> None:
    rows = due_now("remind", 3)
    doomed = start_remote(STOP_AT="handled")
    worker = start_worker()
    wait_until(_stopped, "a process is in the middle of it")
    for pid in _stopped():
        os.kill(pid, signal.SIGKILL)
    processes.kill(doomed)
    start_remote()
    rows += due_now("remind")
    wait_until(settled(4), seconds=120)
    end(worker)
    assert effects("remind") == {row.pk: 1 for row in rows}


def _stopped() -> list[int]:
    """Return the processes of this test that have suspended themselves."""
    return [pid for pid in processes.descendants() if is_stopped(pid)]


@of_celery
@pytest.mark.usefixtures("short_lease")
def test_lost_messages_are_sent_again_after_a_lease(engine: Engine, start_worker: Start, start_remote: Start) -> None:
    rows = due_now("remind", 10)
    worker = start_worker()
    wait_until(engine.waiting, "messages are in the queue")
    assert states() == {"pending": 10}
    engine.lose()
    start_remote()
    wait_until(settled(10), seconds=120)
    end(worker)
    assert effects("remind") == {row.pk: 1 for row in rows}
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}


@of_celery
def test_doubled_and_forged_messages_have_no_effect(
    engine: Engine, start_worker: Start, start_remote: Start, send: Callable[[list[Any]], None]
) -> None:
    due, (waiting,) = due_now("remind", 5), due_now("linger")
    tomorrow = timezone.now() + timedelta(days=1)
    Timeout.objects.filter(pk=waiting.pk).update(run_at=tomorrow, due_at=tomorrow)
    ids = [row.pk for row in due]
    genuine = {"version": 1, "policy": "testapp.order.remind", "ids": ids, "suspect": False, "using": "default"}
    forged: list[Any] = [
        {**genuine, "policy": "testapp.order.linger"},
        {**genuine, "policy": "testapp.order.nonsense"},
        {**genuine, "policy": "testapp.order.linger", "ids": [waiting.pk], "suspect": True},
        {**genuine, "ids": [10**9]},
        {**genuine, "ids": [-1, "1", None]},
        {**genuine, "ids": list(range(1, 2000))},
        {**genuine, "using": "elsewhere"},
        None, [], "text", {},
    ]  # fmt: skip
    send([*forged, genuine, genuine, genuine, {**genuine, "suspect": True}])
    start_remote()
    worker = start_worker()
    wait_until(settled(5))
    wait_until(lambda: not engine.waiting(), "all messages were received")
    due += due_now("remind", 5)
    wait_until(settled(10))
    end(worker)
    assert effects("remind") == {row.pk: 1 for row in due}
    waiting.refresh_from_db()
    assert (waiting.state, waiting.attempts, waiting.history) == ("pending", 0, [])


@of_celery
@pytest.mark.parametrize("ends", [("kill", "start"), ("pause", "resume")], ids=["down", "silent"])
def test_a_broker_that_is_down_does_not_stop_the_worker(
    engine: Engine, start_worker: Start, start_remote: Start, tmp_path: Path, ends: tuple[str, str]
) -> None:
    """Nor does one that does not answer, which is given up."""
    start_remote()
    worker = start_worker()
    rows = due_now("remind", 5)
    wait_until(settled(5), "it works")
    getattr(engine.broker, ends[0])()
    rows += due_now("remind", 20)
    log = tmp_path / "worker.log"
    wait_until(lambda: "cannot send messages" in log.read_text(), "it is logged")
    assert "AttributeError" not in log.read_text(), "the log has the error of the broker"
    assert worker.poll() is None
    assert states() == {"fired": 5, "pending": 20}
    getattr(engine.broker, ends[1])()
    if ends[1] == "start":
        start_remote()  # it may have ended with its broker; its process manager would start it again
    wait_until(settled(25), "due timeouts fire when the broker is back", seconds=120)
    end(worker)
    assert effects("remind") == {row.pk: 1 for row in rows}
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}
