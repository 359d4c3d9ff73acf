"""The one seam for time, for arming as for firing.

Two clocks exist. `now()` is this process's clock and only names new deadlines. `DatabaseNow()` is the
database server's clock in UTC, and it alone decides whether a row is due: a worker whose clock is
minutes ahead therefore fires nothing early. `set_to()` puts a moment in the place of both, for tests and
for the replay of recorded orders.

Django's own `Now()` is no substitute: on MySQL and MariaDB it is the session's local time, so with the
server at +08:00 a row that is due in seven hours would count as due.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connections
from django.db.models import DateTimeField, Expression, Value
from django.utils import timezone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_lock = threading.Lock()
_moment: datetime | None = None


def now() -> datetime:
    """This process's current moment: aware under `USE_TZ=True`, else naive local time like Django's."""
    return _moment if _moment is not None else timezone.now()


@contextmanager
def set_to(moment: datetime) -> Iterator[None]:
    """Everything in this process believes that it is `moment`, until the block ends. May be nested.

    Replaces both clocks in all threads of the process. Raises TypeError for what is no datetime,
    and ValueError for one whose awareness does not fit `USE_TZ`.
    """
    if not isinstance(moment, datetime):
        raise TypeError(
            f"set_to() takes the datetime that the clocks show, not {moment!r}. For a moment so much later than now: "
            "set_to(clock.now() + timedelta(...))."
        )
    global _moment  # noqa: PLW0603 - worker threads must see it too, so neither a context variable nor a thread local
    if timezone.is_aware(moment) != settings.USE_TZ:
        raise ValueError(f"With USE_TZ={settings.USE_TZ} the moment must be {'aware' if settings.USE_TZ else 'naive'}.")
    with _lock:
        before, _moment = _moment, moment
    try:
        yield
    finally:
        with _lock:
            _moment = before


class DatabaseNow(Expression):
    """The database's current moment in UTC, evaluated once per statement, comparable with `DateTimeField`s.

    PostgreSQL: `STATEMENT_TIMESTAMP()`, which an index can be searched by, unlike the volatile
    `CLOCK_TIMESTAMP()`. MySQL, MariaDB: `UTC_TIMESTAMP(6)`. SQLite has no server: its clock is ours.
    """

    output_field = DateTimeField()
    contains_aggregate = False

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        return self._value(compiler, now())

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        if _moment is not None:
            return self._value(compiler, _moment)
        if settings.USE_TZ:
            return "STATEMENT_TIMESTAMP()", ()
        return "(STATEMENT_TIMESTAMP() AT TIME ZONE %s)", (settings.TIME_ZONE,)

    def as_mysql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        if _moment is not None:
            sql, params = self._value(compiler, _moment)
            return f"CAST({sql} AS DATETIME(6))", params  # bare, a selected moment would come back as a text
        # The columns are in the zone that DATABASES names, in UTC if it names none, or in Django's own without USE_TZ.
        # Named zones need tables that many servers lack, so the zone goes in as its offset at this moment.
        offset = datetime.now(connection.timezone or timezone.get_default_timezone()).utcoffset()
        if not offset:
            return "UTC_TIMESTAMP(6)", ()
        return "(UTC_TIMESTAMP(6) + INTERVAL %s SECOND)", (int(offset.total_seconds()),)

    @staticmethod
    def _value(compiler: SQLCompiler, moment: datetime) -> tuple[str, tuple[Any, ...]]:
        sql, params = compiler.compile(Value(moment, output_field=DateTimeField()))
        return sql, tuple(params)


def database_now(using: str) -> datetime:
    """The moment by the clock of database `using`, in one query (none on SQLite or under `set_to`)."""
    connection = connections[using]
    if _moment is not None:
        return _moment
    if connection.vendor == "sqlite":
        return timezone.now()
    sql = {"postgresql": "SELECT STATEMENT_TIMESTAMP()", "mysql": "SELECT UTC_TIMESTAMP(6)"}[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(sql)
        moment: datetime = cursor.fetchone()[0]
    aware = moment if timezone.is_aware(moment) else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC) if settings.USE_TZ else timezone.make_naive(aware)


def to_ms(moment: datetime) -> int:
    """Milliseconds since 1970 UTC, rounded up: a hint that rang early would only make a worker look twice."""
    aware = moment if timezone.is_aware(moment) else timezone.make_aware(moment)
    return -((_EPOCH - aware) // timedelta(milliseconds=1))
