"""procrastinate with its Django integration."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from procrastinate.contrib.django import app

from benchmarks.rivals.base import Contestant, Setting, empty, multiply, relation_bytes
from benchmarks.shop import jobs

DOCS = "https://procrastinate.readthedocs.io/en/stable/"


@app.task(name="note")
async def note(pk: int, due: float) -> None:
    jobs.record(due)


@app.task(name="settle")
def settle(pk: int, due: float) -> None:
    jobs.settle(pk)


TASKS = {"note": note, "settle": settle}


class Adapter(Contestant):
    title = "procrastinate"
    package = "procrastinate"
    on_commit = False
    settings = (
        Setting("the Django connector: jobs are part of the transaction", DOCS + "howto/django/configuration.html"),
        Setting("drain: two workers, `--concurrency 4` each", DOCS + "howto/basics/worker.html"),
        Setting("`--fetch-job-polling-interval 0.1`, and LISTEN/NOTIFY", DOCS + "howto/basics/worker.html"),
        Setting("`--delete-jobs successful`", DOCS + "howto/production/delete_finished_jobs.html"),
        Setting("`batch_defer`", DOCS + "howto/advanced/batch_defer.html"),
        Setting("`async` for the task that does nothing", DOCS + "howto/basics/tasks.html"),
    )

    def clear(self) -> None:
        empty("procrastinate_")

    def schedule(self, job: str, pk: int, at: float) -> Any:
        return TASKS[job].configure(schedule_at=datetime.fromtimestamp(at, UTC)).defer(pk=pk, due=at)

    def cancel(self, handle: Any) -> None:
        assert app.job_manager.cancel_job_by_id(handle)

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        when = datetime.fromtimestamp(at, UTC)
        for start in range(0, len(pks), 1000):
            part = [{"pk": pk, "due": at} for pk in pks[start : start + 1000]]
            TASKS[job].configure(schedule_at=when).batch_defer(*part)

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        for start in range(0, len(pks), 1000):
            TASKS[job].batch_defer(*({"pk": pk, "due": 0.0} for pk in pks[start : start + 1000]))

    def worker(self, kind: str) -> list[list[str]]:
        command = [sys.executable, "-m", "django", "procrastinate", "worker", "--concurrency", "4"]
        options = ["--fetch-job-polling-interval", "0.1", "--delete-jobs", "successful"]
        return [[*command, *options]] * (2 if kind == "drain" else 1)

    def grow(self, count: int) -> None:
        self.schedule("note", 1, time.time() + 3000)
        multiply("procrastinate_jobs", {"scheduled_at": "now() + (2400 + n % 1200) * interval '1 second'"}, count)

    def bytes_stored(self) -> dict[str, float]:
        return {"database_bytes": relation_bytes("procrastinate_%")}
