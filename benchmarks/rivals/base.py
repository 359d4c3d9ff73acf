"""What the harness asks of a contestant. Runs in the contestant's own process (see `benchmarks.client`)."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from cProfile import Profile

REDIS_URL = os.environ.get("BENCH_REDIS_URL", "redis://")
PAGE = 1000


class Meter:
    """CPU and wall time of a block, for the whole calling process with its threads.

    Args:
        is_baseline: the block is what another block is compared with; a profile subtracts it.
    """

    profiles: ClassVar[tuple[Profile, Profile] | None] = None
    """The profilers of blocks and of baselines, while `benchmarks.profiles` wants a profile."""
    recorder: ClassVar[Callable[..., Any] | None] = None
    """An execute wrapper of Django that sees the statements of blocks, while `benchmarks.floor` wants them."""

    def __init__(self, *, is_baseline: bool = False) -> None:
        self._profile = self.profiles and self.profiles[is_baseline]
        self._recorder = None if is_baseline else type(self).recorder  # not as a method

    def __enter__(self) -> Meter:
        if self._recorder:
            _connection().execute_wrappers.append(self._recorder)
        if self._profile:
            self._profile.enable()
        self._began, self._cpu, self._server_cpu = time.perf_counter(), _cpu(), _session_cpu()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu, self.seconds = _cpu() - self._cpu, time.perf_counter() - self._began
        self.server_cpu = _session_cpu() - self._server_cpu
        if self._profile:
            self._profile.disable()
        if self._recorder:
            _connection().execute_wrappers.remove(self._recorder)

    def per_call(self, count: int) -> dict[str, float]:
        """Return the figures of a block that made `count` calls."""
        server = {"server_us": self.server_cpu * 1e6 / count} if self.server_cpu else {}
        return {"cpu_us": self.cpu * 1e6 / count, **server, "per_second": count / self.seconds}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_clock(pid: int) -> int:
    """Return the clock of the CPU time of another process, to the nanosecond: clock_getcpuclockid(3)."""
    return (~pid << 3) | 2


def _connection() -> Any:
    from django.db import connection

    return connection


def _session_cpu() -> float:
    """Return the CPU seconds of the process of PostgreSQL that serves Django's connection here; 0 if there is none."""
    session = _connection().connection if _connection().vendor == "postgresql" else None
    return time.clock_gettime(cpu_clock(session.info.backend_pid)) if session and not session.closed else 0.0


class Contestant:
    """A way to run `note` (nothing) and `settle` (lock, check, save) for a business row at a deadline.

    `schedule_many` and `cancel` are None for a contestant without such a function: the tables state "no API".
    """

    title: ClassVar[str]
    package: ClassVar[str]
    docs: ClassVar[str] = ""
    settings: ClassVar[Sequence[tuple[str, str]]]
    """What it runs with, and the page below `docs`, or the URL, that describes it."""
    tasks: ClassVar[Mapping[str, Any]] = {}
    """The task of each job of `benchmarks.shop.jobs`, as the contestant declares it."""
    on_commit: ClassVar[bool] = True
    """Whether a call inside a transaction has to wait for its commit (True), or is part of it (False)."""
    rows: Mapping[int, Any] = {}
    """The business rows that `prepare` has created last, by key. django-delayq schedules objects, its rivals keys."""
    schedule_many: Any = None
    cancel: Any = None
    unique_columns: Mapping[str, str] = {}
    """SQL expressions of the number `n` for the columns of a job that must differ between jobs."""

    def set_up(self) -> None:
        """Create what the contestant needs beside Django's own tables. Called once."""

    def clear(self) -> None:
        """Delete all jobs. No worker runs meanwhile."""
        import redis

        redis.Redis.from_url(REDIS_URL).flushall()

    def schedule(self, job: str, pk: int, at: float) -> Any:
        """Have `job` run for the row `pk` at the time `at`, in seconds since the epoch; return a handle."""
        raise NotImplementedError

    def enqueue(self, job: str, pks: Sequence[int]) -> None:
        """Have `job` run for each row now, in the fastest documented way."""
        for pk in pks:
            self.tasks[job](pk, 0.0)

    def worker(self, kind: str) -> list[list[str]]:
        """Return the commands of the worker processes: `drain` for throughput, `lag` or `idle` for one worker."""
        raise NotImplementedError

    def grow(self, count: int) -> None:
        """Store `count` pending jobs that are due in 40 to 60 minutes, in the fastest way there is."""
        raise NotImplementedError

    def bytes_stored(self) -> dict[str, float]:
        """Return how many bytes all pending jobs occupy: `redis_bytes`, `database_bytes`, or both."""
        import redis

        return {"redis_bytes": float(redis.Redis.from_url(REDIS_URL).info("memory")["used_memory"])}


def python(*arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", *arguments]


def when(at: float) -> datetime:
    """Return seconds since the epoch as a datetime."""
    return datetime.fromtimestamp(at, UTC)


def pages(pks: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield a thousand keys at a time."""
    return (pks[start : start + PAGE] for start in range(0, len(pks), PAGE))


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


def copy_rows(table: str, replaced: Mapping[str, str], count: int) -> None:
    """Insert `count` copies of the newest row of a table of PostgreSQL in one statement.

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
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM generate_series(1, {count}) AS n, "
            f"(SELECT * FROM {table} ORDER BY id DESC LIMIT 1) AS o"
        )


def multiply(table: str, replaced: Mapping[str, str], count: int) -> None:
    """Insert copies without triggers, and update the statistics of the table."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        copy_rows(table, replaced, count)
        cursor.execute("SET session_replication_role = DEFAULT")
        cursor.execute(f"ANALYZE {table}")
