"""huey with Redis."""

from __future__ import annotations

from typing import Any

import django
from huey import RedisHuey

from benchmarks.rivals.base import REDIS_URL, Contestant, python, when
from benchmarks.shop.jobs import JOBS

huey = RedisHuey("bench", url=REDIS_URL, results=False)
django.setup()


class Adapter(Contestant):
    title = "huey"
    package = "huey"
    docs = "https://huey.readthedocs.io/en/latest/"
    settings = (
        ("`-k process`, one process per core, for tasks that compute", "consumer.html#worker-types"),
        ("`-s 1`: the finest interval of the scheduler", "consumer.html#options-for-the-consumer"),
        ("`results=False`", "api.html#huey-object"),
        ("`-n`: no periodic tasks", "consumer.html#options-for-the-consumer"),
        ("blocking reads of Redis, so that no delay applies", "api.html#RedisHuey"),
    )
    tasks = {name: huey.task()(job) for name, job in JOBS.items()}

    def schedule(self, job: str, pk: int, at: float) -> Any:
        task = self.tasks[job].s(pk, at, eta=when(at))
        huey.enqueue(task)
        return task

    def cancel(self, handle: Any) -> None:
        huey.revoke_by_id(handle.id)

    def worker(self, kind: str) -> list[list[str]]:
        consumer = python("huey.bin.huey_consumer", "benchmarks.rivals.huey.huey")
        return [[*consumer, "-k", "process", "-w", "2", "-s", "1", "-n", "-q"]]
