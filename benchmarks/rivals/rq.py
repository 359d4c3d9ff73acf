"""RQ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import django
from redis import Redis
from rq import Queue

from benchmarks.rivals.base import REDIS_URL, Contestant, pages, when
from benchmarks.shop.jobs import note, settle

QUIET = {"result_ttl": 0, "failure_ttl": 60}
django.setup()  # the workers import `note` and `settle` from this module
TASKS = {job.__name__: f"{__name__}.{job.__name__}" for job in (note, settle)}


class Adapter(Contestant):
    title = "rq"
    package = "rq"
    docs = "https://python-rq.org/docs/"
    settings = (
        ("two workers, one per core, with `--with-scheduler`", "scheduling/"),
        ("`SimpleWorker`: no fork for each job", "https://github.com/rq/rq/blob/master/docs/benchmark.md"),
        ("`result_ttl=0`", "results/"),
        ("bulk: one pipeline for 1,000 jobs", "#bulk-job-enqueueing"),
    )

    def set_up(self) -> None:
        self._redis = Redis.from_url(REDIS_URL)
        self._queue = Queue("default", connection=self._redis)

    def schedule(self, job: str, pk: int, at: float) -> Any:
        return self._queue.enqueue_at(when(at), TASKS[job], pk, at, **QUIET)

    def cancel(self, handle: Any) -> None:
        handle.cancel()

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        for part in pages(pks):
            with self._redis.pipeline() as pipeline:
                for pk in part:
                    self._queue.enqueue_at(when(at), TASKS[job], pk, at, pipeline=pipeline, **QUIET)
                pipeline.execute()

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        for part in pages(pks):
            self._queue.enqueue_many([Queue.prepare_data(TASKS[job], (pk, 0.0), **QUIET) for pk in part])

    def worker(self, kind: str) -> list[list[str]]:
        program = str(Path(sys.executable).parent / "rq")
        options = ["--with-scheduler", "-w", "rq.SimpleWorker", "--quiet", "default"]
        return [[program, "worker", "-u", REDIS_URL, *options]] * (2 if kind == "drain" else 1)
