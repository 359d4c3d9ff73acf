"""Compare primary keys with the `object_id` of the ledger, in the database: `key_types` defines the text."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.db.models import CharField, F, Func, OuterRef, Q, QuerySet

from django_delayq.exceptions import PolicyError
from django_delayq.key_types import key_type, object_id_of, refusal, root_of_key
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model
    from django.db.models.expressions import Combinable
    from django.db.models.sql.compiler import SQLCompiler


def tables_of(model: type[Model]) -> list[type[Model]]:
    """Return the models whose timeouts concern objects of `model`: its own table's, and those of its parents.

    Each has a key of its own in the ledger: that of a multi-table child may be another one than its parent's.
    """
    own = cast("type[Model]", model._meta.concrete_model)
    return [own, *(parent for parent in own._meta.all_parents if not parent._meta.proxy and not refusal(parent))]


def kind_of(table: type[Model], using: str) -> int:
    """Return the id of the content type under which the ledger has objects of `table`."""
    return int(ContentType.objects.db_manager(using).get_for_model(table).pk)


def object_id(reference: Any, model: type[Model], using: str) -> Combinable:
    """Return `reference`, the primary key of `model` in the surrounding query, as `Timeout.object_id` has it.

    Raises:
        PolicyError: the type of the key is not supported on this database.
    """
    connection = connections[using]
    if words := refusal(model, connection):
        raise PolicyError(words)
    return _InLedgerCollation(key_type(model).sql(reference, root_of_key(model), connection))


def key_of(reference: Any, model: type[Model], using: str) -> Combinable | None:
    """Return the primary key of `model` of which `reference`, an `object_id`, is the text; NULL for other texts.

    Of the key's own type, so that its index finds it. None: SQL cannot convert it back, as the type or the collation
    is another.
    """
    found: Combinable | None = key_type(model).key(reference, root_of_key(model), connections[using])
    return found


def about(tables: Iterable[type[Model]], objects: QuerySet[Any] | Iterable[Model], using: str) -> Q:
    """Return the condition on ledger rows that are about any of `objects`, as objects of `tables`.

    No objects means no rows.
    """
    wanted = Q(pk__in=[])
    for table in tables:
        key: Any = table._meta.pk
        ids: Any
        rows = objects.using(using) if isinstance(objects, QuerySet) else None
        if rows is not None and not rows.query.is_sliced:
            ids = rows.order_by().annotate(delayq_id=object_id(F(key.name), table, using)).values("delayq_id")
        else:  # MySQL refuses a slice as a subquery
            keys = [getattr(obj, key.attname) for obj in (objects if rows is None else rows)]
            ids = [object_id_of(table, each) for each in keys if each is not None]
        wanted |= Q(content_type=kind_of(table, using), object_id__in=ids)
    return wanted


def about_each(model: type[Model], using: str) -> Q:
    """Return the condition on ledger rows that are about the row of a surrounding query over `model`."""
    wanted = Q(pk__in=[])
    for table in tables_of(model):
        own_id = object_id(OuterRef(cast("Any", table._meta.pk).name), table, using)
        wanted |= Q(content_type=kind_of(table, using), object_id=own_id)
    return wanted


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
