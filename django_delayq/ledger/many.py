"""Write many rows by one statement: their values travel as one JSON parameter, which the database unfolds into rows.

Through the ORM each row costs an instance, the preparation of its 24 values and as many placeholders, together several
times the work of the database. JSON is encoded and decoded in C.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_delayq.dialects import dialect_of
from django_delayq.ledger.locking import as_it_is
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SLOT = ("slot", "slot_taken")
"""The columns of the unique index that allows one pending row for each slot."""


def upsert(
    rows: Sequence[Mapping[str, Any]], common: Mapping[str, Any], update: Sequence[str], using: str
) -> list[tuple[str, int]]:
    """Insert `rows` with the values that they have in `common`; return the slots and ids of the rows in their slots.

    Args:
        rows: each with the same columns, among them `slot`; for strings, numbers and datetimes.
        common: the values of the other columns, by the names of the model's attributes.
        update: the columns that are written over a row whose slot is taken.
        using: the database.
    """
    connection = connections[using]
    fields = {field.attname: field for field in Timeout._meta.concrete_fields}
    fixed = {name: fields[name].get_db_prep_save(value, connection) for name, value in common.items()}
    # A NULL among the parameters would have no type.
    absent = tuple(name for name, value in fixed.items() if value is None)
    sql = _upsert_statement(tuple(rows[0]), tuple(common), absent, tuple(update), using)
    values = [value for value in fixed.values() if value is not None]
    with connection.cursor() as cursor:
        cursor.execute(sql, [*values, _as_json(rows, fields, connection)])
        if connection.features.can_return_rows_from_bulk_insert:
            return list(cursor.fetchall())
    slots = [row["slot"] for row in rows]  # MySQL returns nothing
    taken = as_it_is(Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1), using)
    return list(taken.values_list("slot", "id"))


def _as_json(rows: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], connection: Any) -> str:
    """Return `rows` as JSON, with datetimes as the database writes them."""
    adapted = functools.cache(connection.ops.adapt_datetimefield_value)
    return json.dumps(rows, default=lambda moment: str(adapted(moment)))


@functools.cache
def _upsert_statement(
    given: tuple[str, ...], common: tuple[str, ...], absent: tuple[str, ...], update: tuple[str, ...], using: str
) -> str:
    """Return the statement that inserts rows with the columns `given` from JSON, and the columns `common` alike."""
    connection = connections[using]
    dialect, quoted = dialect_of(connection), connection.ops.quote_name
    fields: dict[str, Any] = {field.attname: field for field in Timeout._meta.concrete_fields}
    columns = ", ".join(quoted(fields[name].column) for name in (*common, *given))
    values = ", ".join("NULL" if name in absent else "%s" for name in common)
    rows = dialect.rows_of_json({name: fields[name].cast_db_type(connection) for name in given}, "given")
    names = ", ".join(f"given.{name}" for name in given)
    conflict = dialect.on_conflict([quoted(name) for name in SLOT], [quoted(fields[name].column) for name in update])
    sql = f"INSERT INTO {quoted(Timeout._meta.db_table)} ({columns}) SELECT {values}, {names} FROM {rows} {conflict}"
    if connection.features.can_return_rows_from_bulk_insert:
        sql += f" RETURNING {quoted('slot')}, {quoted('id')}"
    return sql
