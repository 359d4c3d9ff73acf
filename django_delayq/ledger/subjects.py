"""Whom a timeout is about: a policy, an object, a key, and the slot that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from django.contrib.contenttypes.models import ContentType
from django.db.models import Model

from django_delayq.key_types import object_id_of, pk_of
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout, slot_of
from django_delayq.policies import registry, resolve_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_delayq.models import TimeoutQuerySet
    from django_delayq.policies import TimeoutPolicy

MAX_KEY = 200


@dataclass(frozen=True, slots=True)
class Subject:
    """One policy's place for one object and key in one database; or, with `row_id`, one row of it."""

    policy: TimeoutPolicy[Any] | None
    """None: a row whose policy is not declared any more; it can still be found, cancelled and moved."""
    model: type[Model] | None
    pk: Any
    labels: tuple[str, ...]
    content_type_id: int
    object_id: str
    key: str
    using: str
    row_id: int | None = None

    @property
    def slot(self) -> str:
        """The slot that new rows take."""
        return slot_of(self.labels[0], self.content_type_id, self.object_id, self.key)

    @property
    def slots(self) -> list[str]:
        """The slots under the present and all former labels of the policy, the present first."""
        return [slot_of(label, self.content_type_id, self.object_id, self.key) for label in self.labels]

    def rounds(self) -> TimeoutQuerySet:
        """Every row of this subject, newest first."""
        rows: TimeoutQuerySet = Timeout.objects.using(self.using).order_by("-id")
        return rows.filter(slot__in=self.slots) if self.row_id is None else rows.filter(pk=self.row_id)

    def pending(self) -> TimeoutQuerySet:
        """The row that waits, if there is one; found by the unique slot."""
        return self.rounds().filter(slot_taken=1)

    @property
    def about(self) -> str:
        """The object's id, and the key if there is one."""
        return f"{self.object_id}{f' ({self.key})' if self.key else ''}"

    def __str__(self) -> str:
        """For errors, which are English; people read `Story.title`."""
        return f"{self.labels[0]} of {self.about}"


def subject_at(policy: TimeoutPolicy[Any], pk: Any, key: str, using: str) -> Subject:
    """The subject of the object with the primary key `pk`.

    Raises:
        ValueError: `key` is no text, longer than 200 characters, or holds NUL, which PostgreSQL refuses.
    """
    if not isinstance(key, str) or len(key) > MAX_KEY or "\0" in key:
        raise ValueError(f"key must be a text of at most {MAX_KEY} characters without NUL, not {key!r}.")
    content_type = ContentType.objects.db_manager(using).get_for_model(policy.concrete_model)
    object_id = object_id_of(policy.concrete_model, pk)
    pk = pk_of(policy.concrete_model, object_id)  # of the key's own type, also for an object made with a text
    return Subject(policy, policy.model, pk, policy.labels, content_type.pk, object_id, key, using)


def subject_of(target: Model, policy: str | TimeoutPolicy[Any] | None, key: str = "") -> Subject:
    """What a public verb was asked to act on: an object and a policy, or a row of the ledger itself.

    Raises:
        UnknownPolicy: no such policy for this kind of object.
        ValueError: an object that is not saved, or a wrong key.
        TypeError: neither a model instance nor a `Timeout`, or no policy for an object.
    """
    if isinstance(target, Timeout):
        return _subject_of_row(target)
    if not isinstance(target, Model):
        words = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise TypeError(f"Expected a model instance or a Timeout, not {words}.")
    if policy is None:
        raise TypeError(f"Which policy of {type(target).__name__}? Name one: the policy, its label or its name.")
    resolved = resolve_policy(policy, type(target))
    pk = resolved.pk_of(target)
    if pk is None or target._state.adding:
        raise ValueError(f"{target!r} is not saved: save it first, its timeouts are kept by its primary key.")
    return subject_at(resolved, pk, key, database_of(type(target), target))


def instances(target: Any) -> list[Model]:
    """Return the model instances that `target` is, or that it contains. Raises TypeError for anything else."""
    if isinstance(target, type):
        raise TypeError(f"Expected model instances or a queryset, not a class. Pass {target.__name__}.objects.all().")
    found = [target] if isinstance(target, Model) or not isinstance(target, Iterable) else list(target)
    for obj in found:
        if not isinstance(obj, Model):
            raise TypeError(f"Expected model instances or a queryset of them, not {obj!r}.")
    return found


def _subject_of_row(row: Timeout) -> Subject:
    if row.pk is None:
        raise ValueError("This Timeout is not a row of the ledger.")
    policy = registry.get(row.policy)
    using = database_of(Timeout, row)
    model, pk = _object_of(row, using)
    labels = (row.policy,) if policy is None else (row.policy, *(x for x in policy.labels if x != row.policy))
    return Subject(policy, model, pk, labels, row.content_type_id, row.object_id, row.key, using, row.pk)


def _object_of(row: Timeout, using: str) -> tuple[type[Model] | None, Any]:
    """Return the model and the key of the object; (None, None) if the row names no model or no key of it."""
    policy = registry.get(row.policy)
    model = policy.model if policy else model_of_kind(row.content_type_id, using)
    try:
        return model, None if model is None else pk_of(model, row.object_id)
    except ValueError:
        return None, None


def objects_of(rows: Iterable[Timeout], using: str) -> Iterator[tuple[int, type[Model], list[Any]]]:
    """Yield content type, model and sorted keys of the objects of `rows`, in the order in which all callers lock them.

    Reads `policy`, `content_type_id` and `object_id` of each row, and no other column.
    """
    for kind, same in groupby(sorted(rows, key=_kind_of), key=_kind_of):
        found = [_object_of(row, using) for row in same]
        models = [model for model, _ in found if model is not None]
        if models:
            yield kind, models[0], sorted({pk for model, pk in found if model is not None and pk is not None})


def _kind_of(row: Timeout) -> int:
    return row.content_type_id


def model_of_kind(content_type_id: int, using: str) -> type[Model] | None:
    """The model that a row's content type names; None if the model, or the content type itself, is gone."""
    try:
        return ContentType.objects.db_manager(using).get_for_id(content_type_id).model_class()
    except ContentType.DoesNotExist:
        return None
