"""Which rows are about an object, or about each row of a list of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.contrib.contenttypes.models import ContentType
from django.db.models import F, Model, OuterRef, Q

from django_delayq.ledger.locking import database_of
from django_delayq.ledger.subjects import object_id_of
from django_delayq.models import Timeout
from django_delayq.object_ids import object_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_delayq.models import TimeoutQuerySet


def tables_of(model: type[Model]) -> list[type[Model]]:
    """The models whose timeouts are an object's of `model`: its own table's, and those of its parents."""
    own = cast("type[Model]", model._meta.concrete_model)
    return [own, *own._meta.all_parents]


def of_object(obj: Model) -> TimeoutQuerySet:
    """Every row about `obj`, of whatever policy, also as an object of its parents' kinds."""
    return of_objects([obj])


def of_objects(objects: Sequence[Model]) -> TimeoutQuerySet:
    """Every row about any of `objects`, which are of one model."""
    model = type(objects[0])
    using = database_of(model, objects[0])
    about = Q(pk__in=[])
    for table in tables_of(model):
        key: Any = table._meta.pk
        ids = [object_id_of(table, getattr(obj, key.attname)) for obj in objects]
        about |= Q(content_type=_kind(table, using), object_id__in=ids)
    rows: TimeoutQuerySet = Timeout.objects.using(using).filter(about)
    return rows


def of_each(model: type[Model]) -> TimeoutQuerySet:
    """The rows about each row of a surrounding query over `model`, for a subquery."""
    using = database_of(model)
    about = Q(pk__in=[])
    for table in tables_of(model):
        key: Any = table._meta.pk
        path = cast("F", OuterRef(key.name))
        about |= Q(content_type=_kind(table, using), object_id=object_id(path, table, using))
    rows: TimeoutQuerySet = Timeout.objects.filter(about)
    return rows


def kinds_of(model: type[Model]) -> list[int]:
    """The content types under which rows about objects of `model` are kept."""
    return [_kind(table, database_of(model)) for table in tables_of(model)]


def _kind(table: type[Model], using: str) -> int:
    return int(ContentType.objects.db_manager(using).get_for_model(table).pk)
