"""dramatiq with Redis."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import django
import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.rivals.base import Contestant, Setting
from benchmarks.shop import jobs

DOCS = "https://dramatiq.io/"
dramatiq.set_broker(RedisBroker(url=os.environ.get("BENCH_REDIS_URL")))
django.setup()


@dramatiq.actor
def note(pk: int, due: float) -> None:
    jobs.record(due)


@dramatiq.actor
def settle(pk: int, due: float) -> None:
    jobs.settle(pk)


QUICK_WORKER = """
import time, dramatiq
from benchmarks.rivals.dramatiq import note
worker = dramatiq.Worker(note.broker, worker_timeout=10, worker_threads=8)
worker.start()
while True:
    time.sleep(60)
"""
TASKS = {"note": note, "settle": settle}


class Adapter(Contestant):
    title = "dramatiq"
    package = "dramatiq"
    settings = (
        Setting("`--processes 2`, one per core, `--threads 8`: the defaults", DOCS + "guide.html#workers"),
        Setting("the default prefetch", DOCS + "advanced.html#prefetch-limits"),
        Setting("lag: one process with `Worker(worker_timeout=10)`, in ms", DOCS + "reference.html#dramatiq.Worker"),
        Setting("`send_with_options(delay=...)`", DOCS + "guide.html#scheduling-messages"),
    )

    def schedule(self, job: str, pk: int, at: float) -> Any:
        delay = max(0, round((at - time.time()) * 1000))
        return TASKS[job].send_with_options(args=(pk, at), delay=delay)

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        for pk in pks:
            TASKS[job].send(pk, 0.0)

    def worker(self, kind: str) -> list[list[str]]:
        if kind == "lag":
            return [[sys.executable, "-c", QUICK_WORKER]]
        processes = "2" if kind == "drain" else "1"
        return [[sys.executable, "-m", "dramatiq", "benchmarks.rivals.dramatiq", "-p", processes, "-t", "8"]]
