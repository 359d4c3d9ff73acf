"""Celery with Redis as broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from celery import Celery

from benchmarks.rivals.base import REDIS_URL, Contestant, python, when
from benchmarks.shop.jobs import JOBS

app = Celery("bench", broker=REDIS_URL)
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=128,
    worker_timer_precision=0.01,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    broker_transport_options={"visibility_timeout": 43_200},
)
app.conf["CELERY_DB_REUSE_MAX"] = 10_000_000
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


class Adapter(Contestant):
    title = "celery"
    package = "celery"
    docs = "https://docs.celeryq.dev/en/stable/"
    settings = (
        ("pool `prefork` with one process per core", "userguide/workers.html#concurrency"),
        ("`worker_prefetch_multiplier=128` for short tasks", "userguide/optimizing.html#prefetch-limits"),
        ("`task_ignore_result`", "userguide/tasks.html#ignore-results-you-don-t-want"),
        ("`worker_timer_precision=0.01`", "userguide/configuration.html#worker-timer-precision"),
        (f"`{' '.join(QUIET)}`", "reference/cli.html#celery-worker"),
        (
            "`CELERY_DB_REUSE_MAX`: without it each task opens a new database connection, whatever `CONN_MAX_AGE` is",
            "https://github.com/celery/celery/issues/4116",
        ),
    )
    tasks = {name: app.task(job) for name, job in JOBS.items()}

    def clear(self) -> None:
        """Delete queues and messages. The bindings of the exchange remain, because the client caches them."""
        client = redis.Redis.from_url(REDIS_URL)
        for key in client.scan_iter():
            if not key.startswith(b"_kombu.binding."):
                client.delete(key)

    def schedule(self, job: str, pk: int, at: float) -> Any:
        return self.tasks[job].apply_async((pk, at), eta=when(at))

    def cancel(self, handle: Any) -> None:
        app.control.revoke(handle.id)

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        with app.producer_pool.acquire(block=True) as producer:
            for pk in pks:
                self.tasks[job].apply_async((pk, 0.0), producer=producer)

    def worker(self, kind: str) -> list[list[str]]:
        options = ("worker", "-c", "2", "-P", "prefork", "-l", "ERROR")
        return [python("celery", "-A", "benchmarks.rivals.celery:app", *options, *QUIET)]
