"""dramatiq with Redis."""

from __future__ import annotations

import sys
import time
from typing import Any

import django
import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.rivals.base import REDIS_URL, Contestant, python
from benchmarks.shop.jobs import JOBS

BROKER = RedisBroker(url=REDIS_URL)
dramatiq.set_broker(BROKER)
django.setup()
QUICK_WORKER = """
import time, dramatiq
from benchmarks.rivals.dramatiq import BROKER
worker = dramatiq.Worker(BROKER, worker_timeout=10, worker_threads=8)
worker.start()
while True:
    time.sleep(60)
"""


class Adapter(Contestant):
    title = "dramatiq"
    package = "dramatiq"
    docs = "https://dramatiq.io/"
    settings = (
        ("`--processes 2`, one per core, `--threads 8`: the defaults", "guide.html#workers"),
        ("the default prefetch", "reference.html#environment-variables"),
        ("lag: one process with `Worker(worker_timeout=10)`, in ms", "reference.html#dramatiq.Worker"),
        ("`send_with_options(delay=...)`", "guide.html#scheduling-messages"),
    )
    actors = {name: dramatiq.actor(job) for name, job in JOBS.items()}
    tasks = {name: actor.send for name, actor in actors.items()}

    def schedule(self, job: str, pk: int, at: float) -> Any:
        delay = max(0, round((at - time.time()) * 1000))
        return self.actors[job].send_with_options(args=(pk, at), delay=delay)

    def worker(self, kind: str) -> list[list[str]]:
        if kind == "lag":
            return [[sys.executable, "-c", QUICK_WORKER]]
        processes = "2" if kind == "drain" else "1"
        return [python("dramatiq", "benchmarks.rivals.dramatiq", "-p", processes, "-t", "8")]
