"""Follow a path over foreign keys, such as `order__number`, in Python or in SQL; find those a condition names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from django.core.exceptions import FieldDoesNotExist, ObjectDoesNotExist
from django.db.models import F, GeneratedField, Model, Q, QuerySet
from django.db.models.expressions import BaseExpression, RawSQL, Subquery
from django.db.models.query import RawQuerySet
from django.db.models.sql import Query

Source: TypeAlias = str | Callable[[Any], Any]
"""Where an object has a value: a path of attributes such as "team__calendar", or a callable that gets the object."""


class Values(dict[str, Any]):
    """The values at the paths of an object that SQL has read, in place of the object."""


def field_at(model: type[Model], path: str) -> Any:
    """Return the field at the end of `path`, which leads over foreign keys: `order__number`.

    Raises FieldDoesNotExist.
    """
    model, name = end_of(model, path)
    return model._meta.get_field(name)


def end_of(model: type[Model], path: str) -> tuple[type[Model], str]:
    """Return the model at the end of `path`, and the last step. Raises FieldDoesNotExist for a step of another kind."""
    *steps, name = path.split("__")
    for step in steps:
        field: Any = model._meta.get_field(step)
        if not is_reference(field):
            raise FieldDoesNotExist(f"{step!r} of {model.__name__} is not a foreign key.")
        model = field.related_model
    return model, name


def leads_to_attribute(model: type[Model], path: str) -> bool:
    """Return whether `path` leads over foreign keys to a field, a property or another attribute of a class."""
    try:
        model, name = end_of(model, path)
    except FieldDoesNotExist:
        return False
    return hasattr(model, name) or name in {field.name for field in model._meta.get_fields()}


def value_at(obj: Any, path: str) -> Any:
    """Return the value at the end of `path` from `obj`; None if a relation on the way is empty.

    Related objects that were not read yet come from the database of `obj`: a router might send Django to a replica.
    """
    if isinstance(obj, Values):
        return obj[path]
    for step in path.split("__"):
        try:
            read_relations([obj], (step,))
            obj = getattr(obj, step)
        except ObjectDoesNotExist:  # the other side of a one-to-one relation
            return None
        if obj is None:
            return None
    return obj


def read_relations(objects: Sequence[Any], relations: Iterable[str]) -> None:
    """Read the related objects on `relations` of objects of one model and database, in one query for each step.

    Those that were read already stay, and a step that is not a foreign key ends its path.
    """
    for path in relations:
        level = list(objects)
        for step in path.split("__"):
            level = [obj for obj in level if isinstance(obj, Model)]
            if not level or step not in {field.name for field in level[0]._meta.concrete_fields}:
                break
            field: Any = level[0]._meta.get_field(step)
            if not is_reference(field):
                break
            missing = [obj for obj in level if not field.is_cached(obj) and getattr(obj, field.attname) is not None]
            name, using = field.target_field.attname, level[0]._state.db
            if missing:
                keys = {getattr(obj, field.attname) for obj in missing}
                rows = field.related_model._base_manager.using(using).filter(**{f"{name}__in": keys})
                found = {getattr(row, name): row for row in rows}
                for obj in missing:
                    if (related := found.get(getattr(obj, field.attname))) is not None:
                        field.set_cached_value(obj, related)
            level = [field.get_cached_value(obj, default=None) for obj in level]


def found_at(source: Source, obj: Any) -> Any:
    """Return what a path or a callable leads to from `obj`: see `value_at`."""
    return value_at(obj, source) if isinstance(source, str) else source(obj)


def relations_on(path: str) -> tuple[str, ...]:
    """Return what `select_related` takes, so that `value_at` needs no query: all steps but the last."""
    steps, _, _ = path.rpartition("__")
    return (steps,) if steps else ()


def column_at(model: type[Model], path: str) -> Any:
    """Return the type of the column at the end of `path`; None if that is a property or another attribute."""
    try:
        field = field_at(model, path)
    except FieldDoesNotExist:
        return None
    return stored_type(field) if field.concrete and not field.is_relation else None


def is_reference(field: Any) -> bool:
    """Return whether `field` is a foreign key or a one-to-one field."""
    return bool(field.concrete and (field.many_to_one or field.one_to_one) and field.related_model)


def stored_type(field: Any) -> Any:
    """Return `field`, or the output of a generated field."""
    return field.output_field if isinstance(field, GeneratedField) else field


def named_in(node: Any) -> Iterator[str | None]:
    """Yield the names of columns in a condition; None for each part that reads rows which no name leads to."""
    if isinstance(node, Q):
        for child in node.children:
            yield from named_in(child)
    elif isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], str):
        yield node[0]
        yield from named_in(node[1])
    elif isinstance(node, QuerySet | RawQuerySet | Query | Subquery | RawSQL):
        yield None
    elif isinstance(node, F):
        yield str(vars(node)["name"])
    elif isinstance(node, BaseExpression):
        for part in node.get_source_expressions():
            yield from named_in(part)
