"""Write some columns of many rows, each row its own values: one prepared statement, sent for all of them.

Not `bulk_update`: for five hundred rows it builds thousands of expressions, and then takes more time in Python than
the database takes to write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections

from django_delayq.dialects import dialect_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Sequence


def update_each(rows: Sequence[Timeout], names: Sequence[str], using: str, states: Sequence[Timeout.State]) -> None:
    """The columns `names` of each of `rows` are as the instance has them, if the row is in one of `states` still."""
    if not rows:
        return
    connection = connections[using]
    quoted = connection.ops.quote_name
    fields: list[Any] = [Timeout._meta.get_field(name) for name in names]
    columns = ", ".join(f"{quoted(field.column)} = %s" for field in fields)
    state = dialect_of(connection).hidden_from_indexes(quoted("state"))
    marks = ", ".join(["%s"] * len(states))
    table = quoted(Timeout._meta.db_table)
    statement = f"UPDATE {table} SET {columns} WHERE {quoted('id')} = %s AND {state} IN ({marks})"
    known = [str(each) for each in states]
    values = []
    for row in rows:
        new = [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields]
        values.append([*new, row.pk, *known])
    with connection.cursor() as cursor:
        cursor.executemany(statement, values)
