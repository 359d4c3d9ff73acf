"""django-q2: schedules in the database, tasks in Redis."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.rivals.base import Contestant, Setting, empty, relation_bytes
from benchmarks.shop import jobs

DOCS = "https://django-q2.readthedocs.io/en/master/"


def note(pk: int, due: float) -> None:
    jobs.record(due)


def settle(pk: int, due: float) -> None:
    jobs.settle(pk)


class Adapter(Contestant):
    title = "django-q2"
    package = "django-q2"
    on_commit = False
    settings = (
        Setting("Redis as broker, `workers` 2: one per core", DOCS + "configure.html#workers"),
        Setting("`save_limit` -1: results of successful tasks are not stored", DOCS + "configure.html#save-limit"),
        Setting("`guard_cycle` 0.2; the scheduler still runs every 30 s", DOCS + "configure.html#guard-cycle"),
        Setting("bulk: `Schedule.objects.bulk_create`", DOCS + "schedules.html"),
    )

    def clear(self) -> None:
        super().clear()
        empty("django_q_")

    def schedule(self, job: str, pk: int, at: float) -> Any:
        from django_q.tasks import schedule

        when = datetime.fromtimestamp(at, UTC)
        return schedule(f"{__name__}.{job}", pk, at, schedule_type="O", next_run=when)

    def cancel(self, handle: Any) -> None:
        handle.delete()

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        from django_q.models import Schedule

        when, func = datetime.fromtimestamp(at, UTC), f"{__name__}.{job}"
        rows = (Schedule(func=func, args=str((pk, at)), schedule_type="O", next_run=when) for pk in pks)
        Schedule.objects.bulk_create(rows, batch_size=1000)

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        from django_q.tasks import async_task

        for pk in pks:
            async_task(f"{__name__}.{job}", pk, 0.0)

    def worker(self, kind: str) -> list[list[str]]:
        return [[sys.executable, "-m", "django", "qcluster"]]

    def bytes_stored(self) -> dict[str, float]:
        return {"database_bytes": relation_bytes("django_q_%")}
