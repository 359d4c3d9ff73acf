"""django-q2: schedules in the database, tasks in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.rivals.base import PAGE, Contestant, empty, python, relation_bytes, when

JOBS = "benchmarks.shop.jobs."


class Adapter(Contestant):
    title = "django-q2"
    package = "django-q2"
    docs = "https://django-q2.readthedocs.io/en/master/"
    on_commit = False
    settings = (
        ("Redis as broker, `workers` 2: one per core", "configure.html#workers"),
        ("`save_limit` -1: results of successful tasks are not stored", "configure.html#save-limit"),
        ("`guard_cycle` 0.2", "configure.html#guard-cycle"),
        ("the scheduler runs every 30 s", "architecture.html#scheduler"),
        ("bulk: `Schedule.objects.bulk_create`", "schedules.html"),
    )

    def clear(self) -> None:
        super().clear()
        empty("django_q_")

    def schedule(self, job: str, pk: int, at: float) -> Any:
        from django_q.tasks import schedule

        return schedule(JOBS + job, pk, at, schedule_type="O", next_run=when(at))

    def cancel(self, handle: Any) -> None:
        handle.delete()

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        from django_q.models import Schedule

        shared = {"func": JOBS + job, "schedule_type": "O", "next_run": when(at)}
        Schedule.objects.bulk_create((Schedule(args=str((pk, at)), **shared) for pk in pks), batch_size=PAGE)

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        from django_q.tasks import async_task

        for pk in pks:
            async_task(JOBS + job, pk, 0.0)

    def worker(self, kind: str) -> list[list[str]]:
        return [python("django", "qcluster")]

    def bytes_stored(self) -> dict[str, float]:
        return {"database_bytes": relation_bytes("django_q_%")}
