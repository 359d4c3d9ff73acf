"""How a database reads: its plan for a statement, and statistics that its planner has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.db import connection

from django_delayq.models import Timeout, slot_of

SORTING = ("Sort", "TEMP B-TREE", "filesort")
"""What plans call the sorting of rows."""


def analyze() -> None:
    """Let the planner see the ledger as it is now."""
    table = connection.ops.quote_name(Timeout._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE TABLE {table}" if connection.vendor == "mysql" else f"ANALYZE {table}")
        if connection.vendor == "mysql":
            cursor.fetchall()


def plan_of(sql: str) -> str:
    """Return the plan of the database under test for a statement."""
    with connection.cursor() as cursor:
        cursor.execute(f"{'EXPLAIN QUERY PLAN' if connection.vendor == 'sqlite' else 'EXPLAIN'} {sql}")
        return "\n".join(" ".join(map(str, row)) for row in cursor.fetchall())


def planned_row(label: str, kind: int, number: int, due: datetime, key: str = "", **columns: Any) -> Timeout:
    """Return a row of the object `number`, which is not saved."""
    moments = dict.fromkeys(("due_at", "run_at", "first_due_at", "created_at"), due)
    slot = slot_of(label, kind, str(number), key)
    about = {"policy": label, "content_type_id": kind, "object_id": str(number), "key": key, "slot": slot}
    return Timeout(**{**moments, **about, **columns})


@contextmanager
def ledger_of(rows: Iterable[Timeout], blocker: Any) -> Iterator[None]:
    """Store rows for the tests of a module, with statistics of them; delete all rows afterwards."""
    with blocker.unblock():
        Timeout.objects.bulk_create(rows, batch_size=500)
        analyze()
        yield
        Timeout.objects.all().delete()
        analyze()
