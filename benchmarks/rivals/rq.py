"""RQ."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import django
from redis import Redis
from rq import Queue

from benchmarks.rivals.base import Contestant, Setting
from benchmarks.shop import jobs

URL = os.environ.get("BENCH_REDIS_URL", "redis://")
QUIET = {"result_ttl": 0, "failure_ttl": 60}
django.setup()


def note(pk: int, due: float) -> None:
    jobs.record(due)


def settle(pk: int, due: float) -> None:
    jobs.settle(pk)


TASKS = {"note": note, "settle": settle}


class Adapter(Contestant):
    title = "rq"
    package = "rq"
    settings = (
        Setting("two workers, one per core, with `--with-scheduler`", "https://python-rq.org/docs/scheduling/"),
        Setting("`SimpleWorker`: no fork for each job", "https://github.com/rq/rq/blob/master/docs/benchmark.md"),
        Setting("`result_ttl=0`", "https://python-rq.org/docs/results/"),
        Setting("bulk: one pipeline for 1,000 jobs", "https://python-rq.org/docs/#bulk-job-enqueueing"),
    )

    def set_up(self) -> None:
        self._redis = Redis.from_url(URL)
        self._queue = Queue("default", connection=self._redis)

    def schedule(self, job: str, pk: int, at: float) -> Any:
        return self._queue.enqueue_at(datetime.fromtimestamp(at, UTC), TASKS[job], pk, at, **QUIET)

    def cancel(self, handle: Any) -> None:
        handle.cancel()

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        when = datetime.fromtimestamp(at, UTC)
        for start in range(0, len(pks), 1000):
            with self._redis.pipeline() as pipeline:
                for pk in pks[start : start + 1000]:
                    self._queue.enqueue_at(when, TASKS[job], pk, at, pipeline=pipeline, **QUIET)
                pipeline.execute()

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        for start in range(0, len(pks), 1000):
            part = pks[start : start + 1000]
            self._queue.enqueue_many([Queue.prepare_data(TASKS[job], (pk, 0.0), **QUIET) for pk in part])

    def worker(self, kind: str) -> list[list[str]]:
        program = str(Path(sys.executable).parent / "rq")
        command = [program, "worker", "-u", URL, "--with-scheduler", "-w", "rq.SimpleWorker", "--quiet", "default"]
        return [command] * (2 if kind == "drain" else 1)
