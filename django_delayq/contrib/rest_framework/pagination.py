"""Pages by the place of their last row: as quick on the last page as on the first, and nothing is counted."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.models import BooleanField, F, Func, Q, Value
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext_lazy as _
from rest_framework.exceptions import ValidationError
from rest_framework.pagination import BasePagination
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from django_delayq import clock
from django_delayq.dialects import dialect_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django.db.models.sql.compiler import SQLCompiler
    from rest_framework.request import Request
    from rest_framework.views import APIView

    from django_delayq.models import TimeoutQuerySet

MOST_LOOKED_AT: Final = 10_000
"""A page of what no index can find looks at no more rows than this, and goes on from there with the next."""
BIGGEST_ID: Final = 2**63 - 1
YEARS: Final = range(1900, 3000)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands in an order: the values of its columns."""

    order: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, row: Timeout, order: tuple[str, ...]) -> Place:
        return cls(order, tuple(getattr(row, name.lstrip("-")) for name in order))

    def encoded(self) -> str:
        """As a text for a URL."""
        plain = [value.isoformat() if isinstance(value, datetime) else value for value in self.values]
        return base64.urlsafe_b64encode(json.dumps([*self.order, *plain]).encode()).decode().rstrip("=")

    @classmethod
    def decoded(cls, text: str, order: tuple[str, ...]) -> Place:
        """Raises ValueError for anything that is no place in this order."""
        try:
            found = json.loads(base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)))
        except (binascii.Error, UnicodeError, RecursionError) as error:
            raise ValueError("no cursor") from error
        if not isinstance(found, list) or tuple(found[: len(order)]) != order or len(found) != 2 * len(order):
            raise ValueError("a cursor of another list")
        values = found[len(order) :]
        return cls(order, tuple(_value(name, value) for name, value in zip(order, values, strict=True)))

    def rows_behind(self, rows: TimeoutQuerySet) -> TimeoutQuerySet:
        """Those of `rows` that come after this place."""
        return rows.filter(self._compared(rows.db, behind=True))

    def rows_until(self, rows: TimeoutQuerySet) -> TimeoutQuerySet:
        """Those of `rows` up to and including this place."""
        return rows.filter(self._compared(rows.db, behind=False))

    def _compared(self, using: str, *, behind: bool) -> Any:
        ascending = not self.order[0].startswith("-")
        names = [name.lstrip("-") for name in self.order]
        sign = ">" if ascending == behind else "<"
        if len(names) == 1 or dialect_of(connections[using]).compares_rows_by_index:
            return _CompareRows(names, self.values, sign if behind else f"{sign}=")
        word = "gt" if sign == ">" else "lt"
        (first, second), (one, two) = names, self.values
        tie = f"{second}__{word}{'' if behind else 'e'}"
        return Q((f"{first}__{word}", one)) | Q((first, one), (tie, two))


class _CompareRows(Func):
    """`(a, b) > (x, y)`, which PostgreSQL and SQLite search an index by."""

    output_field = BooleanField()

    def __init__(self, names: list[str], values: tuple[Any, ...], sign: str) -> None:
        fields: list[Any] = [Timeout._meta.get_field(name) for name in names]
        literals = [Value(value, output_field=field) for value, field in zip(values, fields, strict=True)]
        super().__init__(*map(F, names), *literals)
        self.sign = sign

    def as_sql(  # type: ignore[override]
        self, compiler: SQLCompiler, connection: Any, **_: Any
    ) -> tuple[str, list[Any]]:
        parts = [compiler.compile(part) for part in self.get_source_expressions()]
        texts, half = [text for text, _ in parts], len(parts) // 2
        sql = f"({', '.join(texts[:half])}) {self.sign} ({', '.join(texts[half:])})"
        return sql, [value for _, values in parts for value in values]


def _value(name: str, value: Any) -> Any:
    if name.lstrip("-") == "id":
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= BIGGEST_ID:
            raise ValueError("no id")
        return value
    moment = parse_datetime(value) if isinstance(value, str) else None
    if moment is None or timezone.is_aware(moment) != timezone.is_aware(clock.now()) or moment.year not in YEARS:
        raise ValueError("no moment")
    return moment


class KeysetPagination(BasePagination):
    """`?cursor=` goes on behind the last row of a page, `?page_size=` says how many; `next` is the way on."""

    page_size = 50
    max_page_size = 500

    def paginate_queryset(self, queryset: Any, request: Request, view: APIView | None = None) -> list[Any]:
        """The next rows of `queryset`, which is ordered by an index that ends with `id`."""
        return self.page_of(queryset, Q(), request)

    def page_of(self, rows: TimeoutQuerySet, narrow: Q, request: Request) -> list[Timeout]:
        """The next of `rows` that `narrow` fits.

        `rows` are found by an index in its order. What `narrow` asks for, no index knows: so a page looks at no
        more than `MOST_LOOKED_AT` rows, and may be short, or empty, although there is a `next`.

        Raises:
            ValidationError: the cursor is of another list, or none at all; or the size is no number.
        """
        self.request, order = request, tuple(str(name) for name in rows.query.order_by)
        order = tuple(name for name in order if name != "state")  # named for MySQL alone, and always the same
        size = self._size(request)
        if text := request.query_params.get("cursor"):
            try:
                rows = Place.decoded(text, order).rows_behind(rows)
            except ValueError as error:
                raise ValidationError({"cursor": [_("This is no cursor of this list.")]}) from error
        end = self._end_of_look(rows, order) if narrow else None
        if end is not None:
            rows = end.rows_until(rows)
        found = list(rows.filter(narrow)[: size + 1])
        page = found[:size]
        self.following = Place.of(page[-1], order) if len(found) > size else end
        return page

    @staticmethod
    def _end_of_look(rows: TimeoutQuerySet, order: tuple[str, ...]) -> Place | None:
        names = [name.lstrip("-") for name in order]
        last = rows.values_list(*names)[MOST_LOOKED_AT - 1 : MOST_LOOKED_AT].first()
        return None if last is None else Place(order, tuple(last))

    def _size(self, request: Request) -> int:
        text = request.query_params.get("page_size")
        if not text:
            return self.page_size
        if not text.isascii() or not text.isdigit() or len(text) > 6 or not int(text):
            raise ValidationError({"page_size": [_("A number from 1 on.")]})
        return min(int(text), self.max_page_size)

    def get_next_link(self) -> str | None:
        """The address of the next page; None: this was the last."""
        if self.following is None:
            return None
        url = self.request.build_absolute_uri()
        return replace_query_param(url, "cursor", self.following.encoded())

    def get_paginated_response(self, data: Any) -> Response:
        return Response({"server_time": clock.now(), "next": self.get_next_link(), "results": data})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        """How a page looks, for OpenAPI."""
        return {
            "type": "object",
            "required": ["server_time", "next", "results"],
            "properties": {
                "server_time": {"type": "string", "format": "date-time"},
                "next": {"type": "string", "format": "uri", "nullable": True},
                "results": schema,
            },
        }

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        """The query's parameters, for OpenAPI."""
        return [
            {
                "name": "cursor",
                "in": "query",
                "required": False,
                "description": "Where the page begins: as `next` of the page before has it.",
                "schema": {"type": "string"},
            },
            {
                "name": "page_size",
                "in": "query",
                "required": False,
                "description": f"How many; {self.page_size} by default, {self.max_page_size} at most.",
                "schema": {"type": "integer", "minimum": 1, "maximum": 999999},
            },
        ]
