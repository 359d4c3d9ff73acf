"""django-delayq itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.rivals.base import Contestant, Meter, Setting, empty, multiply, relation_bytes

WORKER = [sys.executable, "-m", "django", "delayq_worker", "-v0"]


class Adapter(Contestant):
    title = "django-delayq"
    package = "django-delayq"
    on_commit = False
    settings = (
        Setting("defaults for the lag: one process, 4 threads", "docs/settings.md"),
        Setting("drain: as each row states; `--concurrency 1` with two processes for two cores", "docs/worker.md"),
    )

    def set_up(self) -> None:
        import django_delayq

        assert Path(django_delayq.__file__).is_relative_to(os.environ["BENCH_PACKAGE"]), django_delayq.__file__

    def clear(self) -> None:
        super().clear()
        empty("django_delayq_timeout")

    def schedule(self, job: str, pk: int, at: float) -> Any:
        from django_delayq import schedule_timeout

        schedule_timeout(self.rows[pk], job, at=datetime.fromtimestamp(at, UTC))
        return self.rows[pk], job

    def cancel(self, handle: Any) -> None:
        from django_delayq import cancel_timeout

        assert cancel_timeout(*handle)

    def schedule_many(self, job: str, pks: Sequence[int], at: float) -> None:
        from django_delayq import schedule_timeouts

        count = schedule_timeouts([self.rows[pk] for pk in pks], job, at=datetime.fromtimestamp(at, UTC))
        assert count == len(pks), count

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        self.schedule_many(job, pks, time.time())

    def worker(self, kind: str) -> list[list[str]]:
        concurrency = {"lag": [], "idle": [], "4 threads": ["--concurrency", "4"]}.get(kind, ["--concurrency", "1"])
        return [[*WORKER, *concurrency]] * (2 if kind == "drain" else 1)

    def bytes_stored(self) -> dict[str, float]:
        return {**super().bytes_stored(), "database_bytes": relation_bytes("django_delayq_timeout")}

    def grow(self, count: int) -> None:
        """Insert the rows with one statement, and push their ids to Redis, as sweeps do."""
        from django.apps import apps

        from django_delayq import schedule_timeout
        from django_delayq.ledger.outbox import due_ms_of
        from django_delayq.models import Timeout
        from django_delayq.redis_clients import get_worker_engine

        row = apps.get_model("shop", "Task").objects.create()
        schedule_timeout(row, "note", at=datetime.fromtimestamp(time.time() + 3000, UTC))
        at = "date_trunc('milliseconds', now()) + (2400 + n % 1200) * interval '1 second'"
        digest = "encode(sha256(n::text::bytea), 'hex')"
        replaced = {
            "object_id": "(n + 10000000)::text",
            "idempotency_key": f"left({digest}, 32)",
            "slot": f"left({digest}, length(o.slot))",
        }
        times = dict.fromkeys(("due_at", "run_at", "first_due_at"), at)
        multiply("django_delayq_timeout", {**replaced, **times}, count)
        engine = get_worker_engine()
        assert engine is not None
        rows = Timeout.objects.pending().values_list("pk", "run_at").iterator(chunk_size=10_000)
        engine.queue("default", 0).ensure((pk, due_ms_of(run_at)) for pk, run_at in rows)
        engine.close()

    def fire_alone(self, job: str, count: int) -> dict[str, float]:
        """Fire due timeouts one at a time in this process, from the plan to the commit."""
        from django_delayq.firing import plan, run
        from django_delayq.models import Timeout

        ids = list(Timeout.objects.pending().order_by("pk").values_list("pk", flat=True)[:count])
        assert len(ids) == count
        with Meter() as meter:
            for pk in ids:
                works, _ = plan({pk: 1}, "default")
                for work in works:
                    run(work, "default")
        fired = Timeout.objects.filter(pk__in=ids, state="fired").count()
        assert fired == count, f"{fired} of {count} fired"
        return {"cpu_us": meter.cpu * 1e6 / count, "per_second": count / meter.seconds}

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
                with Meter() as meter:
                    for row in rows[start : start + 25]:
                        row.note = "seen"
                        row.save()
                used[name] += meter.cpu * 1e6 / count
        with CaptureQueriesContext(connection) as captured:
            orders[0].save()
        return {
            "with_us": used["with"],
            "without_us": used["without"],
            "more_us": used["with"] - used["without"],
            "statements": float(
                len([q for q in captured if not q["sql"].startswith(("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE"))])
            ),
        }
