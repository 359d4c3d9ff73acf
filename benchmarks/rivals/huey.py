"""huey with Redis."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import django
from huey import RedisHuey

from benchmarks.rivals.base import Contestant, Setting
from benchmarks.shop import jobs

DOCS = "https://huey.readthedocs.io/en/latest/"
huey = RedisHuey("bench", url=os.environ.get("BENCH_REDIS_URL"), results=False)
django.setup()


@huey.task()
def note(pk: int, due: float) -> None:
    jobs.record(due)


@huey.task()
def settle(pk: int, due: float) -> None:
    jobs.settle(pk)


TASKS = {"note": note, "settle": settle}


class Adapter(Contestant):
    title = "huey"
    package = "huey"
    settings = (
        Setting("`-k process`, one process per core, for tasks that compute", DOCS + "consumer.html#worker-types"),
        Setting("`-s 1`: the finest interval of the scheduler", DOCS + "consumer.html#options-for-the-consumer"),
        Setting("`results=False`, and `-n`: no periodic tasks", DOCS + "api.html#huey-object"),
        Setting("blocking reads of Redis, so that no delay applies", DOCS + "api.html#RedisHuey"),
    )

    def schedule(self, job: str, pk: int, at: float) -> Any:
        task = TASKS[job].s(pk, at, eta=datetime.fromtimestamp(at, UTC))
        huey.enqueue(task)
        return task

    def cancel(self, handle: Any) -> None:
        huey.revoke_by_id(handle.id)

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        for pk in pks:
            TASKS[job](pk, 0.0)

    def worker(self, kind: str) -> list[list[str]]:
        consumer = [sys.executable, "-m", "huey.bin.huey_consumer", "benchmarks.rivals.huey.huey"]
        return [[*consumer, "-k", "process", "-w", "2", "-s", "1", "-n", "-q"]]
