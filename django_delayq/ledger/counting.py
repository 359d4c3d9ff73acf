"""Counts that cost the same with a million rows: no further than a cap, and many of them in one statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

from django.db import connections
from django.db.models import QuerySet

CAP: Final = 10_000
AT_ONCE: Final = 100
"""SQLite takes no more than 500 parts of a UNION."""

K = TypeVar("K")


class Count(NamedTuple):
    """A number, or `CAP` and the word that there are more."""

    value: int = 0
    is_capped: bool = False

    def __str__(self) -> str:
        return f"{self.value}+" if self.is_capped else str(self.value)

    def __add__(self, other: object) -> Count:
        """Of two kinds together."""
        if not isinstance(other, Count):
            return NotImplemented
        return Count(self.value + other.value, self.is_capped or other.is_capped)


NOTHING: Final = Count()


def count(rows: QuerySet[Any, Any], cap: int = CAP) -> Count:
    """How many `rows` there are, up to `cap`."""
    return count_each({"": rows}, rows.db, cap)[""]


def count_each(wanted: Mapping[K, QuerySet[Any, Any]], using: str, cap: int = CAP) -> dict[K, Count]:
    """The same for several, in as few statements as possible.

    Each in the order that it has: if that is an index's, the database reads just that part of it. Without an order it
    may think that the cap is soon reached, and read the whole table.
    """
    found: dict[K, Count] = {}
    names = list(wanted)
    for start in range(0, len(names), AT_ONCE):
        parts, params = [], []
        for number, name in enumerate(names[start : start + AT_ONCE], start):
            rows = wanted[name].using(using).values("pk")[: cap + 1]
            sql, values = rows.query.get_compiler(using).as_sql()
            parts.append(f"SELECT {number}, COUNT(*) FROM ({sql}) counted{number}")
            params += values
        with connections[using].cursor() as cursor:
            cursor.execute(" UNION ALL ".join(parts), params)
            for number, value in cursor.fetchall():
                found[names[number]] = Count(min(value, cap), value > cap)
    return found
