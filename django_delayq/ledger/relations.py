"""`TimeoutRelation()` on a model provides `order.timeouts`: the ledger's rows of one object, read-only."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast, overload

from django.contrib.contenttypes.fields import (
    GenericRel,
    GenericRelation,
    ReverseGenericManyToOneDescriptor,
    create_generic_related_manager,
)
from django.core.checks import CheckMessage, Error
from django.db import router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, CharField, Expression, Manager, Model, Q, Subquery
from django.db.models.lookups import Exact, In
from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.where import AND, OR, WhereNode
from django.utils.functional import cached_property

from django_delayq.sql.key_types import object_id_of, refusal, root_of_key

if TYPE_CHECKING:
    from django_delayq.models import RelatedTimeoutQuerySet, Timeout

    class TimeoutRelationManager(Manager[Timeout]):
        """The type of `order.timeouts` for type checkers: a read-only manager with the ledger's filters."""

        def get_queryset(self) -> RelatedTimeoutQuerySet: ...
        def all(self) -> RelatedTimeoutQuerySet: ...
        def filter(self, *args: Any, **kwargs: Any) -> RelatedTimeoutQuerySet: ...
        def exclude(self, *args: Any, **kwargs: Any) -> RelatedTimeoutQuerySet: ...
        def order_by(self, *field_names: Any) -> RelatedTimeoutQuerySet: ...
        def pending(self) -> RelatedTimeoutQuerySet: ...
        def unsettled(self) -> RelatedTimeoutQuerySet: ...
        def due(self) -> RelatedTimeoutQuerySet: ...
        def of_labels(self, labels: Iterable[str]) -> RelatedTimeoutQuerySet: ...
        def of_key(self, key: str) -> RelatedTimeoutQuerySet: ...


WRITES = (
    *("add", "set", "remove", "clear", "create", "get_or_create", "update_or_create"),
    *("bulk_create", "bulk_update", "update", "delete"),
)
BY_KEY = ("exact", "in", "gt", "gte", "lt", "lte")


class _SameObject(Expression):
    """The condition of the join: the ledger row belongs to the object, or to it as an object of a parent's table.

    Django's own condition compares the key with the string in the ledger, which fails for most types of keys.
    """

    output_field = BooleanField()
    conditional = True

    def __init__(self, model: type[Model], key: Any, ledger_alias: str) -> None:
        super().__init__()
        self.model, self.key, self.ledger_alias = model, key, ledger_alias

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **_: Any) -> tuple[str, Any]:
        from django_delayq.ledger.subjects import key_of, kind_of, object_id, tables_of
        from django_delayq.models import Timeout

        fields: list[Any] = [Timeout._meta.get_field(name) for name in ("content_type", "object_id")]
        kind, text = (field.get_col(self.ledger_alias) for field in fields)
        by_root: dict[Any, list[type[Model]]] = {}
        for table in tables_of(self.model):
            by_root.setdefault(root_of_key(table), []).append(table)
        conditions: Any = WhereNode(connector=OR)
        for table, *parents in by_root.values():  # of one root: the parents share their key with the child
            kinds = [kind_of(each, connection.alias) for each in (table, *parents)]
            key = self._key_in(table)
            both: list[Any] = [In(kind, kinds), Exact(text, object_id(key, table, connection.alias))]
            # Redundant, but for the planner: the first comparison uses the index of the ledger, this one the index of
            # the model.
            found = key_of(text, table, connection.alias) if key is self.key else None
            if found is not None:
                both.append(Exact(key, found))
            conditions.add(WhereNode(both), OR)
        return compiler.compile(conditions)

    def _key_in(self, table: type[Model]) -> Any:
        """Return the key in `table` of the object with the key `self.key`; a child may have a different key."""
        if root_of_key(table) is root_of_key(self.model):
            return self.key
        own = cast("type[Model]", self.model._meta.concrete_model)
        rows = own._base_manager.order_by().values(cast("Any", table._meta.pk).name)
        query: Any = rows.query
        child = query.get_initial_alias()
        # Aliases that differ from the tables' names, which the outer query may use.
        aliases = {alias: f"delayq{number}" for number, alias in enumerate(query.alias_map)}
        query.change_aliases(aliases)
        if outer := getattr(self.key, "alias", None):
            query.external_aliases[outer] = True  # and therefore not quoted
        pk: Any = own._meta.pk
        query.where.add(Exact(pk.get_col(aliases[child]), self.key), AND)
        return Subquery(rows)


class _OfObject(Exact):
    """The lookup by which `exclude()` relates its subquery to the object."""

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        target = getattr(self.lhs, "target", None)
        if not isinstance(target, _LedgerObjectId):
            return super().as_sql(compiler, connection)
        return compiler.compile(_SameObject(target.about, self.rhs, self.lhs.alias))


class _LedgerObjectId(CharField):  # type: ignore[type-arg]
    """`Timeout.object_id` as the end of the relation of the model `about`."""

    about: type[Model]

    def get_lookup(self, lookup_name: str) -> Any:
        return _OfObject if lookup_name == "exact" else super().get_lookup(lookup_name)


def _by_key(lookup_name: str, lhs: Any, rhs: Any) -> Any:
    """Return the lookup on the column of `lhs`, because Django would prepare `rhs` for the key of the other model."""
    column = lhs.target.get_col(lhs.alias)
    is_list = isinstance(rhs, (list, tuple, set, frozenset))
    keys = [getattr(each, "pk", each) for each in rhs] if is_list else getattr(rhs, "pk", rhs)
    return column.get_lookup(lookup_name)(column, keys)


class _Rel(GenericRel):
    """The relation from the model's side."""

    def get_lookup(self, lookup_name: str) -> Any:
        return functools.partial(_by_key, lookup_name) if lookup_name in BY_KEY else super().get_lookup(lookup_name)


class _ReadOnlyDescriptor(ReverseGenericManyToOneDescriptor):
    """Provides the manager `order.timeouts`, whose writing methods raise TypeError."""

    @cached_property
    def related_manager_cls(self) -> Any:
        # Imported here, because models with a relation to the ledger may be loaded before it.
        from django_delayq.models import RelatedTimeoutQuerySet, refuse_write

        manager = create_generic_related_manager(self.rel.model._default_manager.__class__, self.rel)
        names = [name for write in WRITES for name in (write, f"a{write}")]
        own: dict[str, Any] = {
            **dict.fromkeys(names, staticmethod(refuse_write)),
            "_queryset_class": RelatedTimeoutQuerySet,
            "_apply_rel_filters": _of_instance,
            "get_prefetch_querysets": _of_instances,
        }
        return type("TimeoutRelationManager", (manager,), own)

    def __set__(self, instance: Any, value: Any) -> NoReturn:
        from django_delayq.models import refuse_write

        refuse_write()


def _of_instance(manager: Any, queryset: Any) -> Any:
    from django_delayq.ledger.subjects import about_objects, tables_of

    using = manager._db or router.db_for_read(manager.model, instance=manager.instance)
    return queryset.using(using).filter(about_objects(tables_of(type(manager.instance)), [manager.instance], using))


def _of_instances(manager: Any, instances: Sequence[Model], querysets: Sequence[Any] | None = None) -> Any:
    """Return what Django needs to prefetch: the rows about `instances`, and functions that match rows to instances."""
    from django_delayq.ledger.subjects import about_objects, kind_of, tables_of
    from django_delayq.models import RelatedTimeoutQuerySet

    if querysets and len(querysets) != 1:
        raise ValueError("A prefetch of timeouts takes one queryset.")
    hints = {"instance": instances[0]}
    rows: Any = querysets[0] if querysets else RelatedTimeoutQuerySet(manager.model, using=manager._db, hints=hints)
    rows._add_hints(**hints)
    rows = rows.using(rows._db or manager._db)

    def names(obj: Model) -> list[tuple[int, str]]:
        """Return content types and ids of `obj` in the ledger; the last pair is the same for a parent and its child."""
        keys = [(table, getattr(obj, cast("Any", table._meta.pk).attname)) for table in tables_of(obj.__class__)]
        return [(kind_of(table, rows.db), object_id_of(table, key)) for table, key in keys]

    owners = {name: names(obj)[-1] for obj in instances for name in names(obj)}
    wanted = Q(pk__in=[])
    for model in {obj.__class__ for obj in instances}:
        wanted |= about_objects(tables_of(model), [obj for obj in instances if obj.__class__ is model], rows.db)

    def owner_of(row: Timeout) -> Any:
        return owners.get((row.content_type_id, row.object_id))

    return rows.filter(wanted), owner_of, lambda obj: names(obj)[-1], False, manager.prefetch_cache_name, False


class TimeoutRelation(GenericRelation):
    """A read-only generic relation to the ledger that never cascades.

    Deleting the object cancels its pending timeouts and keeps the rows. The rows of a multi-table child include those
    of its parents' policies. Joins and prefetches work for every supported type of primary key; a system check refuses
    the others.
    """

    rel_class = _Rel

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: Any) -> Self: ...
        @overload
        def __get__(self, instance: Model, owner: Any) -> TimeoutRelationManager: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("django_delayq.Timeout", **kwargs)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Check that the ledger can name the objects of the model.

        Reports:
            E010: a `TimeoutRelation` on a model whose primary key is not supported.
        """
        words = refusal(self.model)
        return [*super().check(**kwargs), *([Error(words, obj=self, id="django_delayq.E010")] if words else [])]

    def contribute_to_class(self, cls: type[Model], name: str, **kwargs: Any) -> None:  # type: ignore[override]
        super().contribute_to_class(cls, name, **kwargs)
        if not cls._meta.abstract:
            setattr(cls, name, _ReadOnlyDescriptor(cast("Any", self.remote_field)))

    def get_lookup(self, lookup_name: str) -> Any:
        return functools.partial(_by_key, lookup_name) if lookup_name in BY_KEY else super().get_lookup(lookup_name)

    def resolve_related_fields(self) -> Any:
        """Return the pair of fields that relates subqueries; joins use only `get_extra_restriction`."""
        [(field, key)] = super().resolve_related_fields()
        ledger_end: Any = copy.copy(field)
        ledger_end.__class__ = _LedgerObjectId
        vars(ledger_end).pop("cached_col", None)  # of the original
        ledger_end.about = self.model
        return [(ledger_end, key)]

    def get_joining_fields(self, reverse_join: bool = False) -> tuple[Any, ...]:
        """Return no columns, because `get_extra_restriction` has the whole condition."""
        return ()

    def get_extra_restriction(self, alias: Any, remote_alias: Any) -> Any:
        """Return the condition of a join from either side; None for subqueries, which have their own."""
        key: Any = self.model._meta.pk
        return None if alias is None else _SameObject(self.model, key.get_col(alias), remote_alias)

    def bulk_related_objects(self, objs: Any, using: str = "default") -> Any:
        """Return no rows, because Django deletes the returned rows together with the object."""
        return self.remote_field.model._base_manager.db_manager(using).none()
