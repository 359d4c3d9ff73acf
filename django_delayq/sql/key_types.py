"""Convert a primary key between Python, SQL and the string that the ledger stores.

Queries compare that string, the text of the key, with the key itself. So each supported type of key has exactly one
text, which Python and all databases derive from it in the same way. A type without one is refused when a policy is
declared. `TYPES` is the only place that defines this.

`HexField`, `KindField` and `PartialIndex`, by which the ledger stores and finds its keys, are at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from uuid import UUID

from django.core.exceptions import ObjectDoesNotExist
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.backends.ddl_references import Statement
from django.db.models import CharField, Func, Model, Q, Value
from django.db.models.fields.related_descriptors import ForwardManyToOneDescriptor
from django.db.models.functions import Cast, Concat, Lower, Replace, Substr
from django.db.models.sql.compiler import SQLCompiler

from django_delayq.engine.records import MAX_ID
from django_delayq.exceptions import PolicyError
from django_delayq.sql.dialects import dialect_of

LONGEST = 255
"""The column of the ledger for the keys of objects holds no longer text."""
DASHES = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
"""Where the groups of a UUID begin, and how long they are."""


class KeyType:
    """A type of key whose text is `str` of its value, and SQL of the database for the same conversion."""

    name: str = "integer"
    """By which a dialect has its own SQL for the conversion."""

    def text(self, value: Any) -> str:
        """Return the text of `value`, a value of the Python type of the field."""
        return str(value)

    def element(self, value: Any) -> str:
        """Return the text as an element of an array literal of PostgreSQL."""
        return self.text(value)

    def sql(self, reference: Any, field: Any, connection: BaseDatabaseWrapper) -> Any:
        """Return the same text as an SQL expression."""
        return Cast(reference, CharField(max_length=LONGEST))

    def key(self, reference: Any, field: Any, connection: BaseDatabaseWrapper) -> Any:
        """Return the key of which `reference` is the text, as SQL that can use the key's index; NULL if it is none.

        It may be the key of other strings, too: by its collation, or because the cast is lenient.
        """
        template = dialect_of(connection).text_as_key.get(self.name)
        return Cast(reference, field) if template is None else _Template(template, reference, field)

    def fault(self, field: Any) -> str:
        """Return why this key is not supported, or an empty string."""
        return ""


class _Text(KeyType):
    name = "text"

    def text(self, value: Any) -> str:
        return str.__str__(value)  # the value of an enumeration's member, whose `str` is its name

    def element(self, value: Any) -> str:
        return '"' + self.text(value).replace("\\", r"\\").replace('"', r"\"") + '"'

    def key(self, reference: Any, field: Any, connection: BaseDatabaseWrapper) -> Any:
        sql = dialect_of(connection).in_collation_of("{0}", connection, field.model._meta.db_table, field.column)
        return _Template(sql, reference)

    def fault(self, field: Any) -> str:
        if field.max_length is not None and field.max_length <= LONGEST:
            return ""
        return f"its text may be longer than the {LONGEST} characters that the ledger stores: set max_length={LONGEST}"


def _stores_digits(field: Any, connection: BaseDatabaseWrapper) -> bool:
    # Not by the features of the database: in MariaDB older columns are declared by fields that convert their values.
    return "-" not in str(field.get_db_prep_value(UUID(int=0), connection))


class _UUID(KeyType):
    name = "uuid"

    def sql(self, reference: Any, field: Any, connection: BaseDatabaseWrapper) -> Any:
        """Insert the dashes of `str(uuid)` where the column has 32 hex digits."""
        text: Any = super().sql(reference, field, connection)
        if not _stores_digits(field, connection):
            return text
        parts = [Substr(text, start, length) for start, length in DASHES]
        pieces = [piece for part in parts for piece in (Value("-"), part)][1:]
        return Lower(Concat(*pieces, output_field=CharField()))

    def key(self, reference: Any, field: Any, connection: BaseDatabaseWrapper) -> Any:
        if field.db_type(connection) == "uuid":
            return super().key(reference, field, connection)
        text: Any = Cast(reference, CharField(max_length=36))
        if _stores_digits(field, connection):
            text = Replace(text, Value("-"), Value(""))
        return _TEXT.key(text, field, connection)


_INTEGER, _TEXT = KeyType(), _Text()
TYPES: dict[str, KeyType] = {
    **dict.fromkeys(("AutoField", "BigAutoField", "SmallAutoField"), _INTEGER),
    **dict.fromkeys(("IntegerField", "BigIntegerField", "SmallIntegerField"), _INTEGER),
    **dict.fromkeys(("PositiveIntegerField", "PositiveBigIntegerField", "PositiveSmallIntegerField"), _INTEGER),
    **dict.fromkeys(("CharField", "SlugField", "FilePathField"), _TEXT),
    "UUIDField": _UUID(),
}
NAMES = "integer, UUID and text"
"""The supported types in words, for messages."""


def root_of_key(model: type[Model]) -> Any:
    """Return the field that holds the primary key of `model` itself: for a one-to-one key, the key it points to."""
    field: Any = model._meta.pk
    while field.remote_field is not None:
        field = field.target_field
    return field


@functools.lru_cache(maxsize=1000)
def key_type(model: type[Model]) -> KeyType:
    """Return the type of the primary key of `model`.

    Raises:
        PolicyError: the type is not supported.
    """
    if words := refusal(model):
        raise PolicyError(words)
    return TYPES[root_of_key(model).get_internal_type()]


def refusal(model: type[Model]) -> str:
    """Return why timeouts cannot refer to objects of `model` by their primary key, or an empty string."""
    name = model._meta.label
    if len(model._meta.pk_fields) > 1:
        return f"{name}: models with a composite primary key are not supported. Use a single field as the key."
    field = root_of_key(model)
    kind = TYPES.get(field.get_internal_type())
    if kind is None or hasattr(field, "from_db_value"):
        why = f"supported are {NAMES} keys of Django's own field types"
    elif not (why := kind.fault(field)):
        return ""
    return (
        f"{name}: the primary key {field.name!r} is a {type(field).__name__}, which is not supported: {why}. "
        "Or use an automatic primary key and make this field unique."
    )


def object_id_of(model: type[Model], pk: Any) -> str:
    """Return the text of a primary key in the ledger, the same for `"7"` and 7."""
    return key_type(model).text(root_of_key(model).to_python(pk))


def array_of(model: type[Model], pks: Iterable[Any]) -> str:
    """Return primary keys, values of the Python type of the key, as an array literal of PostgreSQL."""
    return "{" + ",".join(map(key_type(model).element, pks)) + "}"


def pk_of(model: type[Model], object_id: str) -> Any:
    """Return the primary key of which `object_id` is the text; ValueError if it is not a key of this model."""
    try:
        pk = root_of_key(model).to_python(object_id)
    except Exception as error:
        raise ValueError(f"{object_id!r} is not a key of {model.__name__}.") from error
    if isinstance(pk, int) and abs(pk) > MAX_ID:  # SQLite raises when it is only asked for one
        raise ValueError(f"{object_id!r} is too big to be a key of {model.__name__}.")
    return pk


def keys_in(model: type[Model], ids: Iterable[str]) -> dict[str, Any]:
    """Return the key of each object by its id in the ledger; none for an id that is not a key of `model`."""
    keys = dict[str, Any]()
    for object_id in ids:
        with suppress(ValueError):
            keys[object_id] = pk_of(model, object_id)
    return keys


class _Template(Func):
    """SQL with `{0}` for the key or its text."""

    def __init__(self, sql: str, reference: Any, output_field: Any = None) -> None:
        super().__init__(reference, output_field=output_field or CharField())
        self.sql = sql

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *_: Any, **__: Any) -> tuple[str, Any]:
        """Compile the reference into every place."""
        sql, params = compiler.compile(self.get_source_expressions()[0])
        return self.sql.replace("{0}", sql), [*params] * self.sql.count("{0}")


class _Literal(Func):
    """A string, or another `template`, in the SQL itself: with a parameter SQLite would not use a partial index."""

    template, arity, output_field = "'%(text)s'", 0, models.CharField()


HAS_KEY = Q(key__gt=_Literal(text=""))
HAS_SHARE = Q(share__gt=_Literal(text=""))
HAS_OWN_QUEUE = ~Q(queue=_Literal(text="default"))
HAS_FAILED = Q(attempts__gt=_Literal(template="0", output_field=models.IntegerField()))
HAS_END_OF_HOLD = Q(held_until__isnull=False)


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

    def create_sql(self, model: Any, schema_editor: BaseDatabaseSchemaEditor, *args: Any, **kwargs: Any) -> Statement:
        partial = schema_editor.connection.features.supports_partial_indexes
        plain = models.Index(fields=self.fields, name=self.name, condition=self.rows if partial else None)
        return plain.create_sql(model, schema_editor, *args, **kwargs)


class HexField(models.CharField):  # type: ignore[type-arg]  # at runtime it takes none
    """128 bits as 32 hexadecimal digits. PostgreSQL stores them as a `uuid`, in 16 bytes.

    Not `UUIDField`: MariaDB would sort its values in another order than Python, in which rows are inserted and locked,
    and an upgrade of MariaDB to 10.7 or newer would break the column.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        return dialect_of(connection).hex_type or super().db_type(connection)

    def get_db_converters(self, connection: BaseDatabaseWrapper) -> list[Any]:
        return [lambda value, *_: value and value.hex] if dialect_of(connection).hex_type else []


NO_KIND = 2**31 - 1
"""The last id that the table of content types can have. Not 0, which Django refuses on MySQL."""


class _KindDescriptor(ForwardManyToOneDescriptor):  # type: ignore[type-arg]
    """Return a content type also for a row whose model was removed, with its content type."""

    def get_queryset(self, **hints: Any) -> Any:
        """Read it from the database of the row: a replica may lack it, and the row would seem to have none."""
        rows = super().get_queryset(**hints)
        database = getattr(hints.get("instance"), "_state", None)
        return rows.using(database.db) if database and database.db else rows

    def get_object(self, instance: Any) -> Any:
        try:
            return super().get_object(instance)
        except ObjectDoesNotExist:
            kind = self.field.remote_field.model(pk=getattr(instance, self.field.attname))
            # What `dumpdata --natural-foreign` writes, and `loaddata` reads as an id that no content type has. With the
            # former id, the row would get the kind that has this id in the other database.
            kind.natural_key = lambda: NO_KIND
            return kind


class KindField(models.ForeignKey):  # type: ignore[type-arg]  # at runtime it takes none
    """A foreign key to a content type, which may have been removed. For migrations it is an ordinary one."""

    forward_related_accessor_class = _KindDescriptor

    def deconstruct(self) -> Any:
        name, _, *rest = super().deconstruct()
        return name, "django.db.models.ForeignKey", *rest
