"""A primary key in SQL as the ledger writes it, and back, so that the two tables can be joined in the database."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import CharField, ExpressionWrapper, F, Func, IntegerField, UUIDField, Value
from django.db.models.functions import Cast, Concat, Lower, Replace, Substr

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


def key_of(reference: Any, model: type[Model], using: str) -> Combinable | None:
    """The primary key of `model` that `reference`, an `object_id`, stands for; none of its keys if it stands for none.

    Of the key's own type, so that its index finds it. None: SQL cannot tell, as the type or the collation is another.
    """
    key: Any = model._meta.pk
    while key.remote_field is not None:
        key = key.target_field
    vendor, features = connections[using].vendor, connections[using].features
    if isinstance(key, IntegerField):  # all automatic keys are
        return _Readable(reference, key, r"^-?[0-9]{1,18}$") if vendor == "postgresql" else Cast(reference, key)
    if isinstance(key, UUIDField):
        if not features.has_native_uuid_field:
            return Replace(Cast(reference, CharField(max_length=36)), Value("-"), Value(""))
        return _Readable(reference, key, "^[0-9a-f-]{36}$") if vendor == "postgresql" else None
    return ExpressionWrapper(reference, CharField()) if isinstance(key, CharField) and vendor != "mysql" else None


class _Readable(Func):
    """On PostgreSQL: the text as a value of the key's type, or NULL. A bare cast of what is none ends the query."""

    def __init__(self, text: Any, key: Any, pattern: str) -> None:
        super().__init__(text, output_field=key)
        self.pattern = pattern

    def as_sql(
        self,
        compiler: SQLCompiler,
        connection: BaseDatabaseWrapper,
        function: str | None = None,
        template: str | None = None,
        arg_joiner: str | None = None,
        **extra_context: Any,
    ) -> tuple[str, Any]:
        """The guarded cast."""
        [text] = self.get_source_expressions()
        sql, params = compiler.compile(text)
        kind = "uuid" if isinstance(self.output_field, UUIDField) else "bigint"
        return f"(CASE WHEN {sql} ~ %s THEN {sql}::{kind} END)", (*params, self.pattern, *params)


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
