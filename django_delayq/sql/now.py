"""The database's clock. It alone decides whether a row is due, so a worker whose clock is fast fires nothing early.

While `clock.set_to()`, freezegun or time-machine has replaced this process's clock, the database's is not asked either.

Django's own `Now()` is not used: on MySQL and MariaDB it is the session's local time, so with the server at +08:00
a row that is due in seven hours would be due now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, DateTimeField, Expression, F, Q, When
from django.db.models.sql.compiler import SQLCompiler
from django.utils import timezone

from django_delayq.sql.dialects import dialect_of
from django_delayq.times.clock import in_own_zone, is_set, latest_start, now

_is_compiling: ContextVar[bool] = ContextVar("is_compiling", default=False)


@contextmanager
def evaluated_at_execution() -> Iterator[None]:
    """Let `DatabaseNow` compile to a function of the connection, where its parameter would be the present time.

    For statements that are compiled once and executed later.
    """
    token = _is_compiling.set(True)
    try:
        with in_own_zone():
            yield
    finally:
        _is_compiling.reset(token)


class DatabaseNow(Expression):
    """The database's current time, evaluated once per statement, comparable with `DateTimeField`s.

    SQLite has no server: its clock is that of this process.
    """

    output_field = DateTimeField()

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        dialect = dialect_of(connection)
        if dialect.server_time and not is_set():
            return dialect.now(connection)
        value = self._adapted if _is_compiling.get() else self._adapted(connection)
        return dialect.datetime_literal("%s"), (value,)

    def _adapted(self, connection: BaseDatabaseWrapper) -> Any:
        return self.output_field.get_db_prep_value(now(), connection)


def database_now(using: str) -> datetime:
    """Return the time by the clock of database `using`, in one query (none on SQLite, or if the clock is set)."""
    connection = connections[using]
    dialect = dialect_of(connection)
    if not dialect.server_time or is_set():
        return now()
    # Without USE_TZ, Django sets the session of PostgreSQL to TIME_ZONE, so that its answer is naive and local, too.
    sql, parameters = (dialect.server_time, ()) if settings.USE_TZ else dialect.now(connection)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {sql}", parameters)
        at: datetime = cursor.fetchone()[0]
    return at.astimezone(UTC) if timezone.is_aware(at) else at.replace(tzinfo=UTC if settings.USE_TZ else None)


def column_within_calendar(name: str) -> Case:
    """Return the column of datetimes `name`, and NULL where `within_calendar` returns None."""
    return Case(When(Q((f"{name}__lt", latest_start())), then=F(name)), output_field=DateTimeField())
