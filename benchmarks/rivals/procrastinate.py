"""procrastinate with its Django integration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from procrastinate.contrib.django import app

from benchmarks.rivals.base import Contestant, empty, multiply, pages, python, relation_bytes, when
from benchmarks.shop import jobs

CONNECTOR = (
    "https://github.com/procrastinate-org/procrastinate/blob/main/procrastinate/contrib/django/django_connector.py"
)


async def note(pk: int, due: float) -> None:
    jobs.record(due)


class Adapter(Contestant):
    title = "procrastinate"
    package = "procrastinate"
    docs = "https://procrastinate.readthedocs.io/en/stable/"
    on_commit = False
    settings: Sequence[tuple[str, str]] = (
        ("the Django connector, which uses the connection of Django: jobs are part of the transaction", CONNECTOR),
        ("drain: two workers, `--concurrency 4` each", "howto/production/concurrency.html"),
        ("`--fetch-job-polling-interval 0.1`, and LISTEN/NOTIFY", "discussions.html#how-polling-works"),
        ("`--delete-jobs successful`", "howto/production/delete_finished_jobs.html"),
        ("`batch_defer`", "howto/basics/batch_defer.html"),
        ("`async` for the task that does nothing", "howto/basics/tasks.html"),
    )
    app = app
    tasks = {"note": app.task(name="note")(note), "settle": app.task(name="settle")(jobs.settle)}

    def clear(self) -> None:
        empty("procrastinate_")

    def schedule(self, job: str, pk: int, at: float) -> Any:
        return self.tasks[job].configure(schedule_at=when(at)).defer(pk=pk, due=at)

    def cancel(self, handle: Any) -> None:
        assert self.app.job_manager.cancel_job_by_id(handle)

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        for part in pages(pks):
            self.tasks[job].configure(schedule_at=when(at)).batch_defer(*({"pk": pk, "due": at} for pk in part))

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        for part in pages(pks):
            self.tasks[job].batch_defer(*({"pk": pk, "due": 0.0} for pk in part))

    def worker(self, kind: str) -> list[list[str]]:
        command = python("django", "procrastinate", "worker", "--concurrency", "4")
        options = ["--fetch-job-polling-interval", "0.1", "--delete-jobs", "successful"]
        return [[*command, *options]] * (2 if kind == "drain" else 1)

    def grow(self, count: int) -> None:
        self.schedule("note", 1, time.time() + 3000)
        multiply("procrastinate_jobs", {"scheduled_at": "now() + (2400 + n % 1200) * interval '1 second'"}, count)

    def bytes_stored(self) -> dict[str, float]:
        return {"database_bytes": relation_bytes("procrastinate_%")}
