"""Operators in another process than the worker, and the ledger afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime

from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from tests.e2e.fairness.conftest import source as source  # noqa: PLC0414
from tests.support.processes import start_worker as start_worker  # noqa: PLC0414 - a fixture, for the tests here

BY = "admin:alice"


def label(name: str) -> str:
    return f"testapp.order.{name}"


def committed(steer: Callable[..., object], name: str) -> datetime:
    """Run an operation on the policy; return a time after its commit."""
    assert steer(label(name), by=BY) is not None
    return database_now("default")


def count(name: str, state: str = "fired") -> int:
    return Timeout.objects.filter(policy=label(name), state=state).count()


def fired_after(name: str, moment: datetime) -> int:
    """Return how many were locked for firing later than `moment`, by the clock of the database."""
    return Timeout.objects.filter(policy=label(name), state="fired", settled_at__gt=moment).count()


def wait_until_stopped(process: subprocess.Popen[bytes], patience: float = 60) -> None:
    """Wait until the kernel has suspended all threads of `process`."""
    deadline = time.monotonic() + patience
    while True:
        pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        if pid:
            assert os.WIFSTOPPED(status), "it has ended"
            return
        assert time.monotonic() < deadline, "it was not suspended"
        time.sleep(0.01)


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
