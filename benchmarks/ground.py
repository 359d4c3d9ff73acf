"""Servers, a database and worker processes for a benchmark, removed afterwards.

The database is SQLite in a file; `DELAYQ_TEST_DB=postgresql` or `mariadb` selects a server (see `tests/servers.py`),
which is started for the run unless its address is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contestants import wait_until  # noqa: E402
from benchmarks.figures import quantile  # noqa: E402
from tests.servers import serving  # noqa: E402
from tools import processes  # noqa: E402

SETTINGS = "tests.settings"


@contextlib.contextmanager
def ground() -> Iterator[None]:
    """Set up Django with an empty database and a Redis prefix of its own."""
    database = os.environ.get("DELAYQ_TEST_DB", "sqlite")
    with serving(["redis", *([database] if database != "sqlite" else [])]) as addresses:
        prefix = f"delayq-bench-{uuid.uuid4().hex}"
        os.environ.update(addresses, DJANGO_SETTINGS_MODULE=SETTINGS, DELAYQ_TEST_PREFIX=prefix)
        import django

        django.setup()
        from django.db import connection

        name = connection.creation.create_test_db(verbosity=0, serialize=False)
        os.environ["DELAYQ_TEST_DB_NAME"] = name
        try:
            yield
        finally:
            _forget(prefix)
            connection.creation.destroy_test_db(name, verbosity=0)


def _forget(prefix: str) -> None:
    from django_delayq.redis_clients import get_engine

    engine = get_engine("default")
    if engine is not None:
        for key in engine.client.scan_iter(match=f"{prefix}*"):
            engine.client.unlink(key)
        engine.close()


@contextlib.contextmanager
def workers(count: int = 1, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start real worker processes, and kill them at the end if they still run."""
    command = [sys.executable, "-m", "django", "delayq_worker", "--processes", "1", "-v0", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = [processes.start(command, env=environment, cwd=ROOT) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            processes.stop(process)


class Probe(threading.Thread):
    """Sample a figure in the background, while the block runs; `seen` has the samples."""

    def __init__(self, sample: Callable[[], float], pause: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.seen: list[float] = []
        self._sample, self._pause, self._stopping = sample, pause, threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(self._pause):
            self.seen.append(self._sample())

    def __enter__(self) -> Probe:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()


def late_sleep() -> float:
    """Return by how many milliseconds a sleep of 20 ms ends late, as a measure of the noise of the machine."""
    began = time.perf_counter()
    time.sleep(0.02)
    return (time.perf_counter() - began - 0.02) * 1000


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return count, p50, p99, max and mean, rounded."""
    figures = {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values), "mean": fmean(values)}
    return {"count": len(values), **{name: round(value, 3) for name, value in figures.items()}}


def show(name: str, results: dict[str, Any]) -> None:
    """Print a small table, and the same as one line of JSON."""
    print(f"\n{name}  (database: {os.environ.get('DELAYQ_TEST_DB', 'sqlite')})")
    for words, values in results.items():
        line = "  ".join(f"{key} {value}" for key, value in values.items()) if isinstance(values, dict) else values
        print(f"  {words:28} {line}")
    print(json.dumps({"benchmark": name, **results}))


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    """Wait until the condition holds; raise TimeoutError if it does not."""
    if not wait_until(condition, seconds):
        raise TimeoutError("the benchmark did not end")
