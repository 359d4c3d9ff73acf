"""Celery with Redis as broker."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from celery import Celery

from benchmarks.rivals.base import Contestant, Setting
from benchmarks.shop import jobs

DOCS = "https://docs.celeryq.dev/en/stable/"

app = Celery("bench", broker=os.environ.get("BENCH_REDIS_URL"))
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=128,
    worker_timer_precision=0.01,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    broker_transport_options={"visibility_timeout": 43_200},
)
app.conf["CELERY_DB_REUSE_MAX"] = 10_000_000


@app.task
def note(pk: int, due: float) -> None:
    jobs.record(due)


@app.task
def settle(pk: int, due: float) -> None:
    jobs.settle(pk)


TASKS = {"note": note, "settle": settle}


class Adapter(Contestant):
    title = "celery"
    package = "celery"
    settings = (
        Setting("pool `prefork` with one process per core", DOCS + "userguide/workers.html#concurrency"),
        Setting("`worker_prefetch_multiplier=128` for short tasks", DOCS + "userguide/optimizing.html#prefetch-limits"),
        Setting("`task_ignore_result`", DOCS + "userguide/tasks.html#ignore-results-you-don-t-want"),
        Setting("`worker_timer_precision=0.01`", DOCS + "userguide/configuration.html#worker-timer-precision"),
        Setting("`--without-gossip --without-mingle --without-heartbeat`", DOCS + "reference/cli.html#celery-worker"),
        Setting(
            "`CELERY_DB_REUSE_MAX`: without it each task opens a new database connection, whatever `CONN_MAX_AGE` is",
            "https://github.com/celery/celery/issues/4116",
        ),
    )

    def clear(self) -> None:
        """Delete queues and messages. The bindings of the exchange remain, because the client caches them."""
        import redis

        client = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"])
        for key in client.scan_iter():
            if not key.startswith(b"_kombu.binding."):
                client.delete(key)

    def schedule(self, job: str, pk: int, at: float) -> Any:
        return TASKS[job].apply_async((pk, at), eta=datetime.fromtimestamp(at, UTC))

    def cancel(self, handle: Any) -> None:
        app.control.revoke(handle.id)

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        with app.producer_pool.acquire(block=True) as producer:
            for pk in pks:
                TASKS[job].apply_async((pk, 0.0), producer=producer)

    def worker(self, kind: str) -> list[list[str]]:
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "ERROR"]
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "benchmarks.rivals.celery:app",
            "worker",
            "-c",
            "2",
            "-P",
            "prefork",
        ]
        return [[*command, *quiet]]
