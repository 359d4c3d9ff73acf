"""The process in which a contestant makes its calls: `python -m benchmarks.client NAME`.

It reads requests from standard input, one JSON object a line, and answers each with a line: `{"result": ...}` or
`{"error": ...}`. The harness is `benchmarks.contestants`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.rivals.base import Contestant, Meter, empty

AHEAD_SECONDS = 1800.0
ROWS_A_STATEMENT = 5_000
MODELS = {
    "note": "Task",
    "note_together": "Task",
    "cancel_unpaid": "Order",
    "settle": "Invoice",
    "settle_together": "Invoice",
    "settle_batch": "Invoice",
}
"""The model of the business rows of each job."""


class Client:
    """The operations that the harness may request, by name."""

    def __init__(self, adapter: Contestant) -> None:
        self.adapter = adapter
        self.pks: dict[str, list[int]] = {}
        self.handles: list[Any] = []
        self.statements: list[Any] = []

    def describe(self) -> dict[str, Any]:
        """Return title, version and settings of the contestant."""
        from importlib.metadata import version

        own = self.adapter
        settings = [(what, page if "://" in page else own.docs + page) for what, page in own.settings]
        return {"title": own.title, "version": version(own.package), "settings": settings}

    def clear(self) -> None:
        """Delete all jobs and business rows."""
        self.adapter.clear()
        empty("shop_")
        self.pks.clear()

    def prepare(self, count: int, model: str = "Task") -> None:
        """Replace the business rows of a model by `count` new ones."""
        from django.apps import apps
        from django.utils import timezone

        table, now = apps.get_model("shop", model), timezone.now()
        empty(table._meta.db_table)
        rows = [table(created_at=now) for _ in range(count)]
        self.adapter.rows = {row.pk: row for row in table.objects.bulk_create(rows, batch_size=ROWS_A_STATEMENT)}
        self.pks[model] = list(self.adapter.rows)

    def unit(self, count: int) -> dict[str, float]:
        """Measure `BEGIN; SELECT 1; COMMIT` through Django."""
        from django.db import connection, transaction

        with Meter() as meter:
            for _ in range(count):
                with transaction.atomic(), connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
        return meter.per_call(count)

    def schedule_one(self, count: int, ahead: float = AHEAD_SECONDS) -> dict[str, float]:
        """Schedule each by a call of its own, due in `ahead` seconds."""
        at = time.time() + ahead
        with Meter() as meter:
            self.handles = [self.adapter.schedule("note", pk, at) for pk in self.pks["Task"][:count]]
        return meter.per_call(count)

    def cancel_one(self, count: int) -> dict[str, float] | None:
        """Cancel what `schedule_one` has scheduled. None: the contestant cannot."""
        if self.adapter.cancel is None:
            return None
        with Meter() as meter:
            for handle in self.handles[:count]:
                self.adapter.cancel(handle)
        return meter.per_call(count)

    def schedule_inside(self, count: int) -> dict[str, float]:
        """Measure the CPU that scheduling adds to a transaction of the caller that updates one row."""
        at, used = time.time() + AHEAD_SECONDS, {True: 0.0, False: 0.0}
        pks = self.pks["Task"][:count]
        for start in range(0, count, 20):
            for with_schedule in (False, True):
                with Meter(is_baseline=not with_schedule) as meter:
                    for pk in pks[start : start + 20]:
                        self._transaction(pk, at, with_schedule)
                used[with_schedule] += meter.cpu
        return {"cpu_us": (used[True] - used[False]) * 1e6 / count}

    def _transaction(self, pk: int, at: float, with_schedule: bool) -> None:
        from django.apps import apps
        from django.db import transaction

        with transaction.atomic():
            apps.get_model("shop", "Plain").objects.filter(pk=pk).update(note="seen")
            if with_schedule and self.adapter.on_commit:
                transaction.on_commit(lambda: self.adapter.schedule("note", pk, at) and None)
            elif with_schedule:
                self.adapter.schedule("note", pk, at)

    def bulk(self, count: int, ahead: float = AHEAD_SECONDS) -> dict[str, float] | None:
        """Schedule many with one call. None: the contestant has no function for it."""
        if self.adapter.schedule_many is None:
            return None
        pks = self.pks["Task"][:count]
        with Meter() as meter:
            self.adapter.schedule_many("note", pks, time.time() + ahead)
        return meter.per_call(count)

    def fill(self, count: int, ahead: float) -> None:
        """Schedule many, in whatever way the contestant has."""
        self.prepare(count)
        if self.bulk(count, ahead) is None:
            self.schedule_one(count, ahead)

    def prepare_for(self, job: str, count: int) -> None:
        """Replace the business rows of a job by `count` new ones. Waits for workers that have locked an old one."""
        self.prepare(count, MODELS[job])

    def enqueue(self, job: str, count: int, prepared: bool = False) -> None:
        """Make `job` due now for `count` business rows: new ones, unless they are `prepared`."""
        if not prepared:
            self.prepare_for(job, count)
        self.adapter.enqueue(job, self.pks[MODELS[job]][:count])

    def at_times(self, times: Sequence[float]) -> None:
        """Schedule one `note` for each of these times."""
        self.prepare(len(times))
        for pk, at in zip(self.pks["Task"], times, strict=True):
            self.adapter.schedule("note", pk, at)

    def profile(self, operation: str, *args: Any) -> dict[str, float]:
        """Return the CPU seconds of an operation of this class by module."""
        from benchmarks.profiles import profiled

        return profiled(lambda: getattr(self, operation)(*args))

    def record(self, operation: str, *args: Any) -> None:
        """Keep the statements of an operation of this class for `floor`."""
        from benchmarks.floor import recorded

        self.statements = recorded(lambda: getattr(self, operation)(*args))

    def floor(self, work: str, count: int) -> dict[str, float]:
        """Measure the statements of a work of django-delayq without the library."""
        from benchmarks.floor import Floor

        return Floor(self.adapter, self.statements).measure(work, count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)


def main(name: str) -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # so that output of a rival is not read as a reply
    os.environ["BENCH_NAME"] = name
    import django
    from django.core.management import call_command

    django.setup()
    adapter = importlib.import_module(f"benchmarks.rivals.{name}").Adapter()
    call_command("migrate", run_syncdb=True, verbosity=0)
    adapter.set_up()
    client = Client(adapter)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": getattr(client, request["operation"])(*request["args"])}
        except Exception as error:  # noqa: BLE001 - the harness reports it and continues with the others
            answer = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer, default=str) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
