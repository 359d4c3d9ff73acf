"""A primary key in SQL as the ledger writes it, so that the two tables can be joined in the database."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import CharField, F, Func, UUIDField, Value
from django.db.models.functions import Cast, Concat, Lower, Substr

from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model
    from django.db.models.expressions import Combinable
    from django.db.models.sql.compiler import SQLCompiler

DASHES = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))


def object_id(reference: F, model: type[Model], using: str) -> Combinable:
    """`reference`, the primary key of `model` in the surrounding query, as `Timeout.object_id` has it.

    SQLite, MySQL and older MariaDB keep a UUID as 32 hex digits, but `str(uuid)` has dashes.
    """
    key: Any = model._meta.pk
    while key.remote_field is not None:
        key = key.target_field
    text: Any = Cast(reference, CharField(max_length=255))
    if isinstance(key, UUIDField) and not connections[using].features.has_native_uuid_field:
        parts = [Substr(text, start, length) for start, length in DASHES]
        text = Lower(Concat(*[piece for part in parts for piece in (Value("-"), part)][1:], output_field=CharField()))
    return _InLedgerCollation(text)


class _InLedgerCollation(Func):
    """On MySQL, compared by the collation of the ledger's column: two different ones are refused by the server."""

    output_field = CharField()
    template = "%(expressions)s"

    def as_mysql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> tuple[str, Any]:
        sql, params = self.as_sql(compiler, connection, **context)
        collation = _collation(connection.alias)
        return (f"(CONVERT({sql} USING {collation.partition('_')[0]}) COLLATE {collation})", params)


@functools.cache
def _collation(using: str) -> str:
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT collation_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = %s AND column_name = 'object_id'",
            [Timeout._meta.db_table],
        )
        row = cursor.fetchone()
    name = str(row[0])
    if not name.replace("_", "").isalnum():
        raise ValueError(f"The server names a strange collation: {name!r}.")
    return name
