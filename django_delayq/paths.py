"""Follow a path over foreign keys, such as `order__number`: to its field, in Python or in SQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from django.core.exceptions import FieldDoesNotExist, ObjectDoesNotExist
from django.db.models import GeneratedField, Model

Source: TypeAlias = str | Callable[[Any], Any]
"""Where an object has a value: a path of attributes such as "team__calendar", or a callable that gets the object."""


def field_at(model: type[Model], path: str) -> Any:
    """Return the field at the end of `path`, which leads over foreign keys: `order__number`.

    Raises FieldDoesNotExist.
    """
    model, name = _end_of(model, path)
    return model._meta.get_field(name)


def _end_of(model: type[Model], path: str) -> tuple[type[Model], str]:
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
        model, name = _end_of(model, path)
    except FieldDoesNotExist:
        return False
    return hasattr(model, name) or name in {field.name for field in model._meta.get_fields()}


def value_at(obj: Any, path: str) -> Any:
    """Return the value at the end of `path` from `obj`; None if a relation on the way is empty.

    Related objects that were not read yet come from the database of `obj`: a router might send Django to a replica.
    """
    for step in path.split("__"):
        try:
            _read_related(obj, step)
            obj = getattr(obj, step)
        except ObjectDoesNotExist:  # the other side of a one-to-one relation
            return None
        if obj is None:
            return None
    return obj


def _read_related(obj: Any, step: str) -> None:
    try:
        field = obj._meta.get_field(step)
    except (AttributeError, FieldDoesNotExist):  # not a model, or a property
        return
    if not is_reference(field) or field.is_cached(obj):
        return
    values = {related.attname: getattr(obj, own.attname) for own, related in field.related_fields}
    if None not in values.values():
        field.set_cached_value(obj, field.related_model._base_manager.using(obj._state.db).get(**values))


def found_at(source: Source, obj: Any) -> Any:
    """Return what a path or a callable leads to from `obj`: see `value_at`."""
    return value_at(obj, source) if isinstance(source, str) else source(obj)


def relations_on(path: str) -> tuple[str, ...]:
    """Return what `select_related` takes, so that `value_at` needs no query: all steps but the last."""
    steps, _, _ = path.rpartition("__")
    return (steps,) if steps else ()


def is_reference(field: Any) -> bool:
    """Return whether `field` is a foreign key or a one-to-one field."""
    return bool(field.concrete and (field.many_to_one or field.one_to_one) and field.related_model)


def stored_type(field: Any) -> Any:
    """Return `field`, or the output of a generated field."""
    return field.output_field if isinstance(field, GeneratedField) else field
