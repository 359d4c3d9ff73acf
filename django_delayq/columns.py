"""A kind of column and a kind of index that the ledger needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.backends.ddl_references import Statement
from django.db.models import Func, Q

from django_delayq.dialects import dialect_of

if TYPE_CHECKING:
    _CharField = models.CharField[str, str]
else:
    _CharField = models.CharField


class _Literal(Func):
    """A string in the SQL itself, because with a parameter SQLite would not use a partial index."""

    template, arity, output_field = "'%(text)s'", 0, models.CharField()


HAS_KEY = Q(key__gt=_Literal(text=""))
HAS_OWN_QUEUE = ~Q(queue=_Literal(text="default"))


class PartialIndex(models.Index):
    """An index of the rows that match `rows`. MySQL and MariaDB, which have no partial indexes, index all rows.

    `rows` contains no parameter, because SQLite does not match a partial index by a bound one.
    """

    def __init__(self, *, rows: Q, **options: Any) -> None:
        super().__init__(**options)
        self.rows = rows

    def deconstruct(self) -> Any:
        path, args, options = super().deconstruct()
        return path, args, {**options, "rows": self.rows}

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Statement:
        partial = schema_editor.connection.features.supports_partial_indexes
        plain = models.Index(fields=self.fields, name=self.name, condition=self.rows if partial else None)
        return plain.create_sql(model, schema_editor, using, **kwargs)


class HexField(_CharField):
    """128 bits as 32 hexadecimal digits. PostgreSQL stores them as a `uuid`, in 16 bytes.

    Not `UUIDField`: MariaDB would sort its values in another order than Python, in which rows are inserted and locked,
    and an upgrade of MariaDB to 10.7 or newer would break the column.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        return dialect_of(connection).hex_type or super().db_type(connection)

    def get_db_converters(self, connection: BaseDatabaseWrapper) -> list[Any]:
        return [lambda value, *_: value and value.hex] if dialect_of(connection).hex_type else []
