"""Search the ledger at a cost that does not depend on its length.

Every list, sweep and count reads a bounded part of one index, in the order of that index. Four techniques are enough:

- keyset pagination (`Order`, `Cursor`): a page starts after the last row of the page before, with no OFFSET;
- a bounded examination (`page`): what no index answers is filtered among a limited number of rows;
- a loose index scan (`distinct`): the distinct values of a column, by one index probe each, in one query;
- capped counts (`count`, `count_each`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import BooleanField, F, Func, Q, QuerySet, Value
from django.db.models.expressions import RawSQL
from django.utils import timezone

from django_delayq.engine.records import MAX_ID
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.policy.policies import registry
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.statements import chunks
from django_delayq.times import clock

MAX_LABELS: Final = 1_000
"""No project has so many policies. A ledger that was filled by mistake may have more labels, each of them a query."""
MAX_COUNT: Final = 10_000
"""How many rows are counted, and examined for a page if no index answers its condition: millions take seconds."""
COUNTS_PER_STATEMENT: Final = 100
"""SQLite accepts at most 500 parts of a UNION."""
YEARS: Final = range(1900, 3000)
"""The years that every supported database can compare in every time zone."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Order:
    """The order of an index: by one datetime column and then by id, or by id alone."""

    column: str
    descending: bool = False

    @classmethod
    def of(cls, rows: QuerySet[Any, Any]) -> Order:
        """Return the order that `rows` already have."""
        first = next(str(name) for name in rows.query.order_by if name != "state")  # see `in_state`
        return cls(first.lstrip("-"), first.startswith("-"))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are compared; the last one is `id`."""
        return ("id",) if self.column == "id" else (self.column, "id")

    @property
    def fields(self) -> list[str]:
        """The arguments for `order_by`."""
        return [f"-{name}" if self.descending else name for name in self.columns]


NEWEST: Final = Order("id", descending=True)
SOONEST: Final = Order("run_at")
LATEST: Final = Order("run_at", descending=True)
LAST_SETTLED: Final = Order("settled_at", descending=True)
BY_DEADLINE: Final = Order("due_at")


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in an order: after the row with these values, whether that row still exists or not."""

    order: Order
    values: tuple[Any, ...]
    """Of `order.columns`."""

    @classmethod
    def at(cls, row: Any, order: Order) -> Cursor:
        """Return the position of `row`."""
        return cls(order, tuple(getattr(row, name) for name in order.columns))

    @classmethod
    def decode(cls, text: str, order: Order) -> Cursor:
        """Return the cursor that `encode` made. Raises ValueError if it is malformed or belongs to another order."""
        name, *at, row_id = text.split(",")
        moments = [datetime.fromisoformat(each) for each in at]
        is_known = name == order.fields[0] and len(moments) == len(order.columns) - 1 and 0 <= int(row_id) <= MAX_ID
        aware = timezone.is_aware(clock.now())
        if not is_known or any(each.year not in YEARS or timezone.is_aware(each) != aware for each in moments):
            raise ValueError(f"{text!r} is not a cursor of the order {order.fields}.")
        return cls(order, (*map(clock.in_utc, moments), int(row_id)))

    def encode(self) -> str:
        """Return a string for a URL, such as `-settled_at,2026-01-01T00:00:00+00:00,17`."""
        values = (value.isoformat() if isinstance(value, datetime) else str(value) for value in self.values)
        return ",".join([self.order.fields[0], *values])

    def after(self, rows: Any) -> Any:
        """Return those of `rows` that come after this position."""
        return self._compared(rows, "<" if self.order.descending else ">")

    def until(self, rows: Any) -> Any:
        """Return those of `rows` up to and including this position."""
        return self._compared(rows, ">=" if self.order.descending else "<=")

    def _compared(self, rows: Any, sign: str) -> Any:
        columns, lookup = self.order.columns, {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}[sign]
        if len(columns) == 1:  # not by a `Value`, which MySQL and MariaDB refuse for an id of 0
            return rows.filter(**{f"id__{lookup}": self.values[0]})
        if not dialect_of(connections[rows.db]).compares_rows_by_index:
            (column, _id), (value, row_id) = columns, self.values
            return rows.filter(Q((f"{column}__{lookup[:2]}", value)) | Q((column, value), (f"id__{lookup}", row_id)))
        # `(a, b) > (x, y)`: PostgreSQL and SQLite start reading their index exactly there.
        fields = [rows.model._meta.get_field(name) for name in columns]
        sides: Any = map(F, columns), map(Value, self.values, fields)
        tuples = [Func(*side, template="(%(expressions)s)") for side in sides]
        is_beyond = Func(*tuples, template="%(expressions)s", arg_joiner=f" {sign} ", output_field=BooleanField())
        return rows.filter(is_beyond)


def in_state(rows: TimeoutQuerySet, state: str) -> TimeoutQuerySet:
    """Return the unsettled `rows` in `state`, soonest first, in the order of the index `delayq_unsettled`.

    On MySQL and MariaDB the state is written as a range: for an equal one they would read all rows in that state from
    the first one on, for every page again.
    """
    rows = rows.unsettled()
    if dialect_of(connections[rows.db]).compares_rows_by_index:
        return rows.filter(state=state).order_by(*SOONEST.fields)
    return rows.filter(state__gte=state, state__lte=state).order_by("state", *SOONEST.fields)


def page(rows: Any, narrow: Q, start: Cursor | None, size: int) -> tuple[list[Any], Cursor | None]:
    """Return the next `size` of `rows` after `start` that match `narrow`, and the cursor of the next page (None: end).

    `rows` are in the order of an index that answers their condition. No index answers `narrow`, so at most
    `MAX_COUNT` rows are examined: the page may be short, or empty, although there is a next one.
    """
    order = Order.of(rows)
    if start is not None:
        rows = start.after(rows)
    last = rows.values_list(*order.columns)[MAX_COUNT - 1 : MAX_COUNT].first() if narrow else None
    end = None if last is None else Cursor(order, tuple(last))
    if end is not None:
        rows = end.until(rows)
    found = list(rows.filter(narrow)[: size + 1])
    return found[:size], Cursor.at(found[size - 1], order) if len(found) > size else end


def ids_if_few(rows: Any, limit: int) -> list[int] | None:
    """Return the ids of `rows` if there are at most `limit`, so that they may be sorted; otherwise None.

    Ids, because SQLite would rather read all of another index that has the rows in the order that is asked for.
    """
    ids = list(rows.values_list("pk", flat=True)[: limit + 1])
    return ids if len(ids) <= limit else None


def distinct(rows: Any, *columns: str, limit: int) -> list[Any]:
    """Return the distinct values of the first of `columns`, which begin an index: one query, and a probe for each."""
    name = rows.model._meta.get_field(columns[0]).attname
    ordered = rows.order_by(*columns).values_list(name)
    following = ordered.filter(Q((f"{name}__gt", RawSQL("found.value", ()))))
    first, then = (each[:1].query.get_compiler(rows.db, elide_empty=False).as_sql() for each in (ordered, following))
    sql = f"WITH RECURSIVE found (value, place) AS (SELECT one.{name}, 1 FROM ({first[0]}) one UNION ALL "
    sql += f"SELECT ({then[0]}), place + 1 FROM found WHERE value IS NOT NULL AND place < {limit}) "
    with connections[rows.db].cursor() as cursor:
        cursor.execute(f"{sql} SELECT value FROM found WHERE value IS NOT NULL", [*first[1], *then[1]])
        return [value for (value,) in cursor.fetchall()]


def labels_in(rows: Any, limit: int = MAX_LABELS) -> list[str]:
    """Return the labels of policies that `rows` have, also of policies that are no longer declared."""
    return distinct(rows, "policy", limit=limit)


def undeclared_in(rows: Any, limit: int = MAX_LABELS) -> list[str]:
    """Return those labels of `rows` that no policy has any more."""
    return [label for label in labels_in(rows, limit) if registry.get(label) is None]


def known_labels(using: str) -> set[str]:
    """Return the labels that a policy or a row has. No line in Redis may have another one."""
    declared = {label for policy in registry for label in policy.labels}
    return declared.union(labels_in(Timeout.objects.using(using).all()))


class Count(NamedTuple):
    """A number of rows, or the cap and that there are more."""

    value: int = 0
    is_capped: bool = False

    def __str__(self) -> str:
        return f"{self.value}+" if self.is_capped else str(self.value)

    def __add__(self, other: Count) -> Count:  # type: ignore[override]
        """Return the sum of two counts."""
        return Count(self.value + other.value, self.is_capped or other.is_capped)


NOTHING: Final = Count()


def count(rows: QuerySet[Any, Any], cap: int = MAX_COUNT) -> Count:
    """Return how many `rows` there are, up to `cap`."""
    return count_each({"": rows}, rows.db, cap)[""]


def count_each(wanted: Mapping[K, QuerySet[Any, Any]], using: str, cap: int = MAX_COUNT) -> dict[K, Count]:
    """Count several querysets in as few statements as possible.

    Give each the order of an index: the database then reads only that part of it. Without an order it may assume that
    the cap is soon reached, and read the whole table.
    """
    found: dict[K, Count] = {}
    for part in chunks(list(wanted), COUNTS_PER_STATEMENT):
        with connections[using].cursor() as cursor:
            cursor.execute(*counting([wanted[name] for name in part], using, cap))
            found |= {part[number]: Count(min(value, cap), value > cap) for number, value in cursor.fetchall()}
    return found


def counting(querysets: Sequence[QuerySet[Any, Any]], using: str, cap: int = MAX_COUNT) -> tuple[str, list[Any]]:
    """Return the statement of `count_each` and its parameters: one row for each queryset, its number and its count."""
    parts, params = [], []
    for number, rows in enumerate(querysets):
        try:
            sql, values = rows.using(using).values("pk")[: cap + 1].query.get_compiler(using).as_sql()
        except EmptyResultSet:  # a condition that no row can meet, such as an empty list of ids
            parts.append(f"SELECT {number}, 0")
            continue
        parts.append(f"SELECT {number}, COUNT(*) FROM ({sql}) counted{number}")
        params += values
    return " UNION ALL ".join(parts), params
