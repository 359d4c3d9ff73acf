"""Servers, a database and worker processes for a benchmark, removed afterwards.

The database is SQLite in a file; `DELAYQ_TEST_DB=postgresql` or `mariadb` selects a server (see `tests/servers.py`),
which is started for the run unless its address is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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

    engine = get_engine()
    if engine is not None:
        for key in engine.client.scan_iter(match=f"{prefix}*"):
            engine.client.unlink(key)
        engine.close()


@contextlib.contextmanager
def workers(count: int = 1, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start real worker processes, and kill them at the end if they still run."""
    command = [sys.executable, "-m", "django", "delayq_worker", "-v0", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = [processes.start(command, env=environment, cwd=ROOT) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            processes.stop(process)


class SleepProbe(threading.Thread):
    """Measure how late a sleep ends on this machine at the same time, which limits every timer."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late: list[float] = []
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            began = time.perf_counter()
            time.sleep(0.02)
            self.late.append((time.perf_counter() - began - 0.02) * 1000)

    def __enter__(self) -> SleepProbe:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99, max and mean, rounded."""
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        "max": round(ordered[-1], 3),
        "mean": round(statistics.fmean(ordered), 3),
    }


def show(name: str, results: dict[str, Any]) -> None:
    """Print a small table, and the same as one line of JSON."""
    print(f"\n{name}  (database: {os.environ.get('DELAYQ_TEST_DB', 'sqlite')})")
    for words, values in results.items():
        line = "  ".join(f"{key} {value}" for key, value in values.items()) if isinstance(values, dict) else values
        print(f"  {words:28} {line}")
    print(json.dumps({"benchmark": name, **results}))


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    """Wait until the condition holds; raise TimeoutError if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the benchmark did not end")
        time.sleep(0.01)
