"""Compare primary keys with the `object_id` of the ledger, in the database: `key_types` defines the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.db.models import CharField, F, Func, OuterRef, Q, QuerySet

from django_delayq.dialects import dialect_of
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
    """A text that can be compared with `Timeout.object_id`."""

    output_field = CharField()
    template = "%(expressions)s"

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *args: Any, **context: Any
    ) -> tuple[str, Any]:
        """Compile the text, in the collation of the column."""
        sql, params = super().as_sql(compiler, connection, *args, **context)
        table = Timeout._meta.db_table
        return dialect_of(connection).in_collation_of(sql, connection, table, "object_id"), params
