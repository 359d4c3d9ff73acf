"""What an operator does in another process than the worker's, and what the ledger says of it afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime

from django_delayq.clock import database_now
from django_delayq.models import Timeout
from tests.e2e.fairness.conftest import source as source  # noqa: PLC0414
from tests.support.processes import start_worker as start_worker  # noqa: PLC0414 - a fixture, for the tests here

BY = "admin:alice"


def label(name: str) -> str:
    return f"testapp.order.{name}"


def committed(steer: Callable[..., object], name: str) -> datetime:
    """The operator's verb is done with the policy, and was committed before the moment that is returned."""
    assert steer(label(name), by=BY) is not None
    return database_now("default")


def count(name: str, state: str = "fired") -> int:
    return Timeout.objects.filter(policy=label(name), state=state).count()


def fired_after(name: str, moment: datetime) -> int:
    """How many were locked to be fired later than `moment`, all by the database's clock."""
    return Timeout.objects.filter(policy=label(name), state="fired", settled_at__gt=moment).count()


def wait_until_stopped(process: subprocess.Popen[bytes], patience: float = 60) -> None:
    """Until the kernel has stopped `process`, all its threads."""
    deadline = time.monotonic() + patience
    while True:
        pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        if pid:
            assert os.WIFSTOPPED(status), "it has ended"
            return
        assert time.monotonic() < deadline, "it goes on and on"
        time.sleep(0.01)


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
