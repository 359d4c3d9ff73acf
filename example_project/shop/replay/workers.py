"""Worker processes that end when the replay ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta
    from types import FrameType

MANAGE = Path(__file__).resolve().parents[2] / "manage.py"
PATIENCE_SECONDS = 30


def delays_in_environment(delays: Mapping[str, timedelta]) -> str:
    """Return the value of `SHOP_DELAYS` that gives another process the same delays."""
    return json.dumps({name: delay.total_seconds() for name, delay in delays.items()})


class WorkersFailed(Exception):
    """A worker exited with an error."""


@contextmanager
def workers(count: int, delays: Mapping[str, timedelta]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` workers inside the block, and stop them afterwards, also after SIGTERM to this process.

    Their output goes to the stderr of this process.

    Raises:
        WorkersFailed: at the end, if a worker did not exit with 0.
    """
    environment = {**os.environ, "SHOP_DELAYS": delays_in_environment(delays), "SHOP_SPEED": "1"}
    command = [sys.executable, str(MANAGE), "delayq_worker", "--processes", "1"]
    processes: list[subprocess.Popen[bytes]] = []
    former = signal.signal(signal.SIGTERM, _leave)
    try:
        for _ in range(count):
            # In their own process group, so that Ctrl-C only reaches this process, which then stops them in order.
            process = subprocess.Popen(command, env=environment, stdout=sys.stderr, process_group=0)
            processes.append(process)  # immediately, so that this one is stopped if the next one does not start
        yield processes
    finally:
        codes = _stop(processes)
        signal.signal(signal.SIGTERM, former)
    if any(codes):
        raise WorkersFailed(f"The workers ended with {codes} instead of 0.")


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _stop(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]
