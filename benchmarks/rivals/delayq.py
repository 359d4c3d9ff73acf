"""django-delayq itself."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.rivals.base import Contestant, Meter, empty, multiply, python, relation_bytes, when

WORKERS = {
    "drain": [],
    "1 thread": ["--processes", "1", "--concurrency", "1", "-v0"],
    "4 threads": ["--processes", "1", "-v0"],
    "2 processes of 1 thread": ["--processes", "2", "--concurrency", "1", "-v0"],
}
"""The options of `delayq_worker`, by kind. All other kinds are one process with the default settings."""
DIGEST = "encode(sha256(n::text::bytea), 'hex')"


class Adapter(Contestant):
    title = "django-delayq"
    package = "django-delayq"
    on_commit = False
    settings = (
        ("drain: the defaults, a process of 4 threads for each core, a line of log for each firing", "docs/worker.md"),
        ("lag, CPU of a worker, an idle worker, memory: the same with `--processes 1`", "docs/worker.md"),
    )

    def set_up(self) -> None:
        import django_delayq

        assert Path(django_delayq.__file__).is_relative_to(os.environ["BENCH_PACKAGE"]), django_delayq.__file__
        from django.db import connection

        from django_delayq.models import Timeout

        digits: list[Any] = [Timeout._meta.get_field(name) for name in ("slot", "idempotency_key")]
        self.unique_columns = {
            "object_id": "(n + 10000000)::text",
            **{each.name: f"left({DIGEST}, {each.max_length})::{each.db_type(connection)}" for each in digits},
        }

    def clear(self) -> None:
        super().clear()
        empty("django_delayq_timeout")

    def schedule(self, job: str, pk: int, at: float) -> Any:
        from django_delayq import schedule_timeout

        schedule_timeout(self.rows[pk], job, at=when(at))
        return self.rows[pk], job

    def cancel(self, handle: Any) -> None:
        from django_delayq import cancel_timeout

        assert cancel_timeout(*handle)

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        from django_delayq import schedule_timeouts

        count = schedule_timeouts([self.rows[pk] for pk in pks], job, at=when(at))
        assert count == len(pks), count

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        self.schedule_many(job, pks, time.time())

    def worker(self, kind: str) -> list[list[str]]:
        from django_delayq.management.commands import delayq_worker

        options = WORKERS.get(kind, ["--processes", "1"])
        if "--processes" not in Path(delayq_worker.__file__).read_text():  # of an earlier release: it has one process
            options = [option for option in options[2:] if options[0] == "--processes"]
        return [python("django", "delayq_worker", *options)]

    def bytes_stored(self) -> dict[str, float]:
        return {**super().bytes_stored(), "database_bytes": relation_bytes("django_delayq_timeout")}

    def bytes_by_relation(self) -> dict[str, float]:
        """Return the bytes of the ledger's heap and of each of its indexes, the largest first."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT relname, pg_relation_size(oid) FROM pg_class WHERE oid = %s::regclass "
                "OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = %s::regclass) ORDER BY 2 DESC",
                ["django_delayq_timeout"] * 2,
            )
            return dict(cursor.fetchall())

    def grow(self, count: int) -> None:
        """Insert `count` settled rows and as many pending ones, each with one statement, and push these to Redis."""
        from django.apps import apps

        from django_delayq.ledger.outbox import due_ms_of
        from django_delayq.ledger.rollups import roll_up
        from django_delayq.models import Timeout
        from django_delayq.redis_clients import get_worker_engine

        row = apps.get_model("shop", "Task").objects.create()
        self.rows = {row.pk: row}
        self.schedule("note", row.pk, time.time())
        self.fire(1)
        past = "date_trunc('milliseconds', now()) - (n % 2000000) * interval '1 second'"
        settled = dict.fromkeys(("due_at", "run_at", "first_due_at", "settled_at"), past)
        multiply("django_delayq_timeout", {**self.unique_columns, **settled}, count)
        roll_up("default")  # as a worker does each minute: an idle one has not a million left to count
        self.schedule("note", row.pk, time.time() + 3000)
        ahead = "date_trunc('milliseconds', now()) + (2400 + n % 1200) * interval '1 second'"
        pending = dict.fromkeys(("due_at", "run_at", "first_due_at"), ahead)
        multiply("django_delayq_timeout", {**self.unique_columns, **pending}, count)
        if (engine := get_worker_engine("default")) is None:
            return
        for label in Timeout.objects.pending().values_list("policy", flat=True).distinct():
            rows = Timeout.objects.pending().filter(policy=label).values_list("pk", "run_at")
            found = ((pk, due_ms_of(run_at)) for pk, run_at in rows.iterator(chunk_size=10_000))
            engine.queue("default", 0).ensure(label, found)
        engine.close()

    def fire(self, count: int, planned: int = 1) -> dict[str, float]:
        """Fire due timeouts in this process, from the plan to the commit, `planned` with each plan, without Redis."""
        from django_delayq.firing import plan, run
        from django_delayq.models import Timeout

        ids = list(Timeout.objects.due().order_by("run_at", "pk").values_list("pk", flat=True)[:count])
        assert len(ids) == count, f"{len(ids)} of {count} are due"
        with Meter() as meter:
            for start in range(0, count, planned):
                works, _ = plan(dict.fromkeys(ids[start : start + planned], 1), "default")
                for work in works:
                    run(work, "default")
        fired = Timeout.objects.filter(pk__in=ids, state="fired").count()
        assert fired == count, f"{fired} of {count} fired"
        return meter.per_call(count)

    def sweep(self, near: int) -> dict[str, float]:
        """Sweep with nothing near, and with `near` timeouts, of which the sweep before has added the other half."""
        from django_delayq.conf import get_settings
        from django_delayq.models import Timeout
        from django_delayq.redis_clients import get_worker_engine
        from django_delayq.worker.servers import ClockSkew
        from django_delayq.worker.sweep import Sweep

        self.schedule_many("note", list(self.rows)[:near], time.time() + 3000)
        ids, used = list(Timeout.objects.order_by("-pk").values_list("pk", flat=True)[:near]), {}
        engine, interval = get_worker_engine("default"), get_settings().sweep_interval.total_seconds()
        sweep = Sweep(engine, "default", ClockSkew("default"))
        for key, coming in (("none", []), ("half", ids[: near // 2]), ("near", ids[near // 2 :])):
            time.sleep(1.1 * interval)  # until it is the turn of this sweep
            due = when(time.time() + 1.9 * interval)
            Timeout.objects.filter(pk__in=coming).update(due_at=due, run_at=due)
            with Meter() as meter:
                swept = sweep.run_once()
            assert swept.changed == len(coming), f"{swept} for {len(coming)} that come near"
            used[key] = (meter.cpu + meter.server_cpu) * 1e6
        assert swept.checked == near, f"{swept} of {near}"
        engine.close()
        return used

    def save_new(self, count: int) -> dict[str, float]:
        """Save new objects whose timeouts are armed by a timedelta, and by working hours."""
        from django.apps import apps
        from django.utils import timezone

        import django_delayq

        used: dict[str, float] = {"Order": 0.0, "Ticket": 0.0}
        begin = timezone.now() + timedelta(days=1)  # neither deadline is near enough for Redis
        for _ in range(0, count, 25):
            for name in used:
                rows = [apps.get_model("shop", name)(created_at=begin) for _ in range(25)]
                with Meter(is_baseline=name == "Order") as meter:
                    for row in rows:
                        row.save()
                used[name] += meter.cpu * 1e6 / count
        figures = {"armed_us": used["Order"]}
        has_spans = hasattr(django_delayq, "Working")
        return figures | ({"span_us": used["Ticket"] - used["Order"]} if has_spans else {})

    def save_unchanged(self, count: int) -> dict[str, float]:
        """Save objects with one automatic policy, and objects without one, with no change that matters to it."""
        from django.apps import apps
        from django.db import connection
        from django.test.utils import CaptureQueriesContext
        from django.utils import timezone

        plain = list(apps.get_model("shop", "Plain").objects.all()[:count])
        orders = [apps.get_model("shop", "Order")(created_at=timezone.now()) for _ in range(count)]
        for order in orders:
            order.save()
        used: dict[str, float] = {"with": 0.0, "without": 0.0}
        for start in range(0, count, 25):
            for name, rows in (("with", orders), ("without", plain)):
                with Meter(is_baseline=name == "without") as meter:
                    for row in rows[start : start + 25]:
                        row.note = "seen"
                        row.save()
                used[name] += meter.cpu * 1e6 / count
        with CaptureQueriesContext(connection) as captured:
            orders[0].save()
        control = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE")
        statements = [query for query in captured if not query["sql"].startswith(control)]
        return {
            "with_us": used["with"],
            "without_us": used["without"],
            "more_us": used["with"] - used["without"],
            "statements": float(len(statements)),
        }
