"""The two clocks, for arming and for firing.

`now()` is this process's clock and is only used to compute deadlines. `DatabaseNow()` is the database server's clock in
UTC. It alone decides whether a row is due, so a worker whose clock is fast fires nothing early. `set_to()` replaces
both, for tests and for the replay of recorded orders. While freezegun or time-machine has replaced the process's clock,
the database's clock is not asked either.

Django's own `Now()` is not used: on MySQL and MariaDB it is the session's local time, so with the server at +08:00
a row that is due in seven hours would be due now.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField, Expression
from django.db.models.sql.compiler import SQLCompiler
from django.utils import timezone

from django_delayq.dialects import dialect_of

_EPOCH, _MILLISECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)
_lock = threading.Lock()
_moments: list[datetime] = []
"""The datetimes of the present blocks of `set_to`, the innermost last."""
_moment: datetime | None = None
"""The last of `_moments`, which other threads can read at any time."""


class _Compiling(threading.local):
    is_kept = False


_compiling = _Compiling()


def now() -> datetime:
    """Return the time by this process's clock: aware under `USE_TZ=True`, otherwise naive local time, as in Django."""
    return _moment if _moment is not None else timezone.now()


@contextmanager
def set_to(moment: datetime) -> Iterator[None]:
    """Set both clocks, in all threads of this process, to `moment` until the block ends. May be nested.

    The end of a block also ends the blocks that began after it.

    Raises TypeError if `moment` is not a datetime, and ValueError if its awareness does not fit `USE_TZ`.
    """
    if not isinstance(moment, datetime):
        raise TypeError(
            f"set_to() takes the datetime that the clocks show, not {moment!r}. To move them by a duration: "
            "set_to(clock.now() + timedelta(...))."
        )
    global _moment  # noqa: PLW0603 - worker threads must see it too, so neither a context variable nor a thread local
    if timezone.is_aware(moment) != settings.USE_TZ:
        raise ValueError(
            f"With USE_TZ={settings.USE_TZ} the datetime must be {'aware' if settings.USE_TZ else 'naive'}."
        )
    with _lock:
        depth = len(_moments)
        _moments.append(moment)
        _moment = moment
    try:
        yield
    finally:
        with _lock:
            del _moments[depth:]
            _moment = _moments[-1] if _moments else None


def is_set() -> bool:
    """Return whether `set_to`, freezegun or time-machine has replaced the clock."""
    if _moment is not None:
        return True
    # Not imported here: a process that has not imported them has not replaced its clock either.
    freezegun, time_machine = sys.modules.get("freezegun.api"), sys.modules.get("time_machine")
    return bool(freezegun and freezegun.freeze_factories) or bool(
        time_machine and time_machine.escape_hatch.is_travelling()
    )


@contextmanager
def evaluated_at_execution() -> Iterator[None]:
    """Let `DatabaseNow` compile to a function of the connection, where its parameter would be the present time.

    For statements that are compiled once and executed later.
    """
    _compiling.is_kept = True
    try:
        yield
    finally:
        _compiling.is_kept = False


class DatabaseNow(Expression):
    """The database's current time, evaluated once per statement, comparable with `DateTimeField`s.

    SQLite has no server: its clock is that of this process.
    """

    output_field = DateTimeField()
    contains_aggregate = False

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        dialect = dialect_of(connection)
        if dialect.server_time and not is_set():
            return dialect.now(connection)
        if _compiling.is_kept:
            return dialect.datetime_literal("%s"), (self._adapted,)
        return dialect.datetime_literal("%s"), (self._adapted(connection),)

    def _adapted(self, connection: BaseDatabaseWrapper) -> Any:
        return self.output_field.get_db_prep_value(now(), connection)


def database_now(using: str) -> datetime:
    """Return the time by the clock of database `using`, in one query (none on SQLite, or if the clock is set)."""
    connection = connections[using]
    server_time = dialect_of(connection).server_time
    if not server_time or is_set():
        return now()
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {server_time}")
        moment: datetime = cursor.fetchone()[0]
    aware = moment if timezone.is_aware(moment) else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC) if settings.USE_TZ else timezone.make_naive(aware)


def aware(moment: datetime) -> datetime:
    """Return `moment` as an aware datetime; a naive one is in the active time zone."""
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)


def fitting(moment: datetime) -> datetime:
    """Return `moment` as `USE_TZ` has datetimes: aware, or naive in the active time zone."""
    if settings.USE_TZ:
        return aware(moment)
    return timezone.make_naive(moment) if timezone.is_aware(moment) else moment


def in_utc(moment: datetime) -> datetime:
    """Return an aware `moment` in UTC, and a naive one unchanged.

    For datetimes that users have entered: PostgreSQL refuses offsets of 16 hours and more, which ISO 8601 allows.
    """
    return moment.astimezone(UTC) if timezone.is_aware(moment) else moment


def local(moment: datetime) -> datetime:
    """Return `moment` in the active time zone; a naive one is in it, and remains naive."""
    return timezone.localtime(moment) if timezone.is_aware(moment) else moment


def to_ms(moment: datetime) -> int:
    """Return the milliseconds since 1970 UTC, rounded up, so that a worker is not woken before the row is due."""
    return -((_EPOCH - aware(moment)) // _MILLISECOND)
