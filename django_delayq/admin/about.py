"""Which rows are about an object, or about each row of a list of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_delayq.ledger.locking import database_of
from django_delayq.ledger.subjects import about, about_each, tables_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.models import Model

    from django_delayq.models import TimeoutQuerySet


def of_object(obj: Model) -> TimeoutQuerySet:
    """Every row about `obj`, of whatever policy, also as an object of its parents' kinds."""
    return of_objects([obj])


def of_objects(objects: Sequence[Model]) -> TimeoutQuerySet:
    """Every row about any of `objects`, which are of one model."""
    model = type(objects[0])
    using = database_of(model, objects[0])
    rows: TimeoutQuerySet = Timeout.objects.using(using).filter(about(tables_of(model), objects, using))
    return rows


def of_each(model: type[Model]) -> TimeoutQuerySet:
    """The rows about each row of a surrounding query over `model`, for a subquery."""
    rows: TimeoutQuerySet = Timeout.objects.filter(about_each(model, database_of(model)))
    return rows
