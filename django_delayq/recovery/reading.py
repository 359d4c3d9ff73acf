"""How the sweep reads the ledger: in the order of the index `delayq_unsettled`, page by page, from any place in it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BigIntegerField, BooleanField, DateTimeField, F, Func, Q, Value
from django.db.models.sql.compiler import SQLCompiler

from django_delayq.dialects import dialect_of
from django_delayq.models import Timeout, TimeoutQuerySet

PAGE: Final = 1_000
PENDING: Final = Timeout.State.PENDING


class Row(NamedTuple):
    """What Redis has to know of a row, and where it stands in the index."""

    run_at: datetime
    id: int
    queue: str
    policy: str
    created_at: datetime


def page_of(using: str, start: datetime | None, place: Row | None, end: datetime) -> list[Row]:
    """The next `PAGE` pending rows behind `place` that are to run from `start` (None: ever) until `end`."""
    return [Row(*values) for values in pending(using, start, place, end).values_list(*Row._fields)[:PAGE]]


def pending(using: str, start: datetime | None, place: Row | None, end: datetime) -> TimeoutQuerySet:
    """The rows of `page_of`, all of them. Ordered and bounded as the index is, so that a page reads only itself."""
    rows: TimeoutQuerySet = Timeout.objects.using(using).unsettled().filter(run_at__lte=end)
    if place is None and start is not None:
        rows = rows.filter(run_at__gte=start)
    if dialect_of(connections[using]).compares_rows_by_index:
        rows = rows.filter(state=PENDING).order_by("run_at", "id")
        return rows if place is None else rows.filter(IsBehind(place))
    rows = rows.filter(state__gte=PENDING, state__lte=PENDING).order_by("state", "run_at", "id")
    return rows if place is None else rows.filter(Q(run_at__gt=place.run_at) | Q(run_at=place.run_at, id__gt=place.id))


class IsBehind(Func):
    """Whether a row stands behind `place` in the order of (run_at, id): a comparison of rows."""

    output_field = BooleanField()

    def __init__(self, place: Row) -> None:
        at = Value(place.run_at, output_field=DateTimeField())
        super().__init__(F("run_at"), F("id"), at, Value(place.id, output_field=BigIntegerField()))

    def as_sql(  # type: ignore[override]
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **_: Any
    ) -> tuple[str, list[Any]]:
        parts = [compiler.compile(part) for part in self.get_source_expressions()]
        params = [value for _, values in parts for value in values]
        return "({}, {}) > ({}, {})".format(*(text for text, _ in parts)), params
