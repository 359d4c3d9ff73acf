"""What the harness asks of a contestant. Runs in the contestant's own process (see `benchmarks.client`)."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple


class Setting(NamedTuple):
    """A setting that a contestant runs with, and the page of its documentation that recommends it."""

    what: str
    source: str


class Meter:
    """CPU and wall time of a block, for the whole calling process with its threads."""

    def __enter__(self) -> Meter:
        self._began, self._cpu = time.perf_counter(), _cpu()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu, self.seconds = _cpu() - self._cpu, time.perf_counter() - self._began


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Contestant:
    """A way to run `note` (nothing) and `settle` (lock, check, save) for a business row at a deadline.

    `schedule_many` and `cancel` are None for a contestant without such a function: the tables state "no API".
    """

    title: ClassVar[str]
    package: ClassVar[str]
    settings: ClassVar[Sequence[Setting]]
    on_commit: ClassVar[bool] = True
    """Whether a call inside a transaction has to wait for its commit (True), or is part of it (False)."""
    rows: Mapping[int, Any] = {}
    """The business rows that `prepare` has created last, by key. django-delayq schedules objects, its rivals keys."""
    schedule_many: Any = None
    cancel: Any = None

    def set_up(self) -> None:
        """Create what the contestant needs beside Django's own tables. Called once."""

    def clear(self) -> None:
        """Delete all jobs. No worker runs meanwhile."""
        import redis

        redis.Redis.from_url(_redis_url()).flushall()

    def schedule(self, job: str, pk: int, at: float) -> Any:
        """Have `job` run for the row `pk` at the time `at`, in seconds since the epoch; return a handle."""
        raise NotImplementedError

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        """Have `job` run for each row now, in the fastest documented way."""
        raise NotImplementedError

    def worker(self, kind: str) -> list[list[str]]:
        """Return the commands of the worker processes: `drain` for throughput, `lag` or `idle` for one worker."""
        raise NotImplementedError

    def grow(self, count: int) -> None:
        """Store `count` pending jobs that are due in 40 to 60 minutes, in the fastest way there is."""
        raise NotImplementedError

    def bytes_stored(self) -> dict[str, float]:
        """Return how many bytes all pending jobs occupy: `redis_bytes`, `database_bytes`, or both."""
        import redis

        return {"redis_bytes": float(redis.Redis.from_url(_redis_url()).info("memory")["used_memory"])}


def relation_bytes(pattern: str) -> float:
    """Return the bytes of heap, TOAST and indexes of the tables whose names match the SQL pattern."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class "
            "WHERE relkind = 'r' AND relname LIKE %s",
            [pattern],
        )
        return float(cursor.fetchone()[0])


def empty(prefix: str) -> None:
    """Empty the tables of this database whose names begin with `prefix`."""
    from django.core.management.color import no_style
    from django.db import connection

    tables = [name for name in connection.introspection.table_names() if name.startswith(prefix)]
    if tables:
        statements = connection.ops.sql_flush(no_style(), tables, reset_sequences=True, allow_cascade=True)
        connection.ops.execute_sql_flush(statements)


def multiply(table: str, replaced: Mapping[str, str], count: int) -> None:
    """Insert `count` copies of the newest row of a table of PostgreSQL, in one statement and without triggers.

    Args:
        table: its primary key is `id`.
        replaced: SQL expressions in place of the copied values, by column. `n` is the number of the copy.
        count: the number of copies.
    """
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 "
            "AND NOT attisdropped AND attgenerated = '' AND attname <> 'id'",
            [table],
        )
        columns = [row[0] for row in cursor.fetchall()]
        values = ", ".join(replaced.get(name.strip('"'), f"o.{name}") for name in columns)
        cursor.execute("SET session_replication_role = replica")
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM generate_series(1, {count}) AS n, "
            f"(SELECT * FROM {table} ORDER BY id DESC LIMIT 1) AS o"
        )
        cursor.execute("SET session_replication_role = DEFAULT")
        cursor.execute(f"ANALYZE {table}")


def _redis_url() -> str:
    return os.environ["BENCH_REDIS_URL"]
