"""Read pending timeouts: as rows, one deadline, a countdown for display, or a deadline as a column of a query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.db.models import Expression, F, IntegerField, Model, OuterRef, QuerySet, Subquery
from django.db.models.fields import DateTimeField
from django.db.models.functions import Coalesce

from django_delayq import clock
from django_delayq.exceptions import UnknownPolicy
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.statements import chunks, compiled, param
from django_delayq.ledger.subjects import (
    NEWEST_FIRST,
    about_model,
    about_objects,
    check_key,
    current_round,
    instances,
    kind_of,
    object_id,
    order_matters,
    subject_of,
    tables_of,
)
from django_delayq.models import Timeout
from django_delayq.policies import M, TimeoutPolicy, get_policy, policies_named, resolve_policy
from django_delayq.relations import TimeoutRelation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

    from django_delayq.ledger.subjects import Subject
    from django_delayq.models import TimeoutQuerySet

    class NullableDateTimeField(DateTimeField[Any, Any]):
        """The type of an annotation with `Deadline` for type checkers: None if nothing is pending."""

        _pyi_private_get_type: datetime | None  # type: ignore[assignment]

    Target = Model | type[Model] | QuerySet[Any] | Iterable[Model] | None
else:
    NullableDateTimeField = DateTimeField


def pending_timeouts(
    target: M | type[M] | Iterable[M] | None = None,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str | None = None,
) -> TimeoutQuerySet:
    """Return the pending timeouts of `target` and `policy`, soonest first, as a queryset.

    Args:
        target: an object, a model, a queryset or an iterable of objects of one model; None: all. Timeouts, one or
            several or a queryset of them: those that are pending. An empty list: none.
        policy: a policy, its label, or with a target its name; None: all.
        key: only this key; None: all.

    Raises:
        UnknownPolicy: no such policy, or a bare name without a target.
        ValueError: an object is not saved, or `key` is not a string that databases store.
        TypeError: the objects are of several models or in several databases, or no objects of a model; or a class that
            is not a model.
    """
    if key is not None:
        check_key(key)
    model, objects = _model_and_objects(target)
    sources: list[Any] = objects if isinstance(objects, list) else [objects]  # a queryset, or None
    places = {database_of(Timeout if model is None else model, source) for source in sources or [None]}
    if len(places) > 1:
        raise TypeError(f"The objects are in several databases, {', '.join(sorted(places))}. Pass those of one.")
    using = places.pop()
    rows = Timeout.objects.using(using).pending().order_by("run_at", "id")
    if target is not None and model is None:
        return rows.none()
    policies = [] if policy is None else _policies(policy, model, objects)
    if policies:
        rows = rows.of_labels(label for each in policies for label in each.labels)
    if model is Timeout:
        if isinstance(objects, QuerySet):
            keys = objects.using(using).values_list("pk", flat=True)
            rows = rows.filter(pk__in=list(keys) if order_matters(objects) else keys)
        elif objects is not None:
            rows = rows.filter(pk__in=[row.pk for row in objects])
    elif model is not None:
        tables = [table for table in tables_of(model) if not policies or table is policies[0].concrete_model]
        of_objects = about_objects(tables, objects, using) if objects is not None else about_model(tables, model, using)
        rows = rows.filter(of_objects)
    return rows if key is None else rows.filter(key=key)


def _policies(policy: str | TimeoutPolicy[Any], model: type[Model] | None, objects: object) -> list[TimeoutPolicy[Any]]:
    """Return the policies that `policy` means for a target: one, unless the target is timeouts of several models."""
    if model is not None and model is not Timeout:
        return [resolve_policy(policy, model)]
    if not isinstance(policy, str) or "." in policy:
        return [get_policy(policy)]
    if objects is None:
        raise UnknownPolicy(f"{policy!r} without a target could be any model's: give its label, app.model.name.")
    return policies_named(policy)


def _model_and_objects(target: Target) -> tuple[type[Model] | None, QuerySet[Any] | list[Model] | None]:
    """Return the model of `target`, and its objects: a list, a queryset, or None for all."""
    if target is None:
        return None, None
    if isinstance(target, type):
        if not issubclass(target, Model) or target._meta.abstract:
            raise TypeError(f"Expected a model, its instances or a queryset of them, not the class {target.__name__}.")
        return target, None
    if isinstance(target, QuerySet):
        return target.model, target
    objects = instances(target)
    kinds = {obj._meta.concrete_model for obj in objects}
    if len(kinds) > 1:
        raise TypeError("The objects must be saved instances of one model.")
    for obj in objects:
        if obj.pk is None:
            raise ValueError(f"{obj!r} is not saved: its timeouts are kept by its primary key.")
    kind = target.__class__ if isinstance(target, Model) else next(iter(kinds), None)
    return kind, objects


def get_deadline(obj: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> datetime | None:
    """Return when the pending timeout of `obj` is due; None: nothing is pending. `obj` may be a `Timeout` itself.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    return subject_of(obj, policy, key).pending().values_list("due_at", flat=True).first()


aget_deadline = sync_to_async(get_deadline)


@dataclass(frozen=True, slots=True)
class Countdown:
    """A deadline as it is displayed, at one point in time. True in a condition while it is pending.

    It contains the server's time, so that a display that counts down does not depend on the user's clock.
    """

    due_at: datetime | None
    """The deadline of the newest round; None: there never was one."""
    state: str
    """The state of the newest round, one of `Timeout.State`; "": there never was one."""
    now: datetime
    """The server's time when this was read: the database's, or this process's if no query was needed."""
    timeout_id: int | None = None

    def __bool__(self) -> bool:
        return self.due_at is not None and self.state == Timeout.State.PENDING

    @property
    def seconds_left(self) -> int | None:
        """Return the whole seconds until the deadline, rounded up, never below zero; None: nothing is pending."""
        if self.due_at is None or not self:
            return None
        return max(0, math.ceil((self.due_at - self.now).total_seconds()))

    @property
    def is_due(self) -> bool:
        """Return whether the deadline has passed and the timeout is still pending: a worker is about to fire it."""
        return self.seconds_left == 0


def countdown_of(target: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> Countdown:
    """Return the countdown of the pending round, or else of the newest one, of `policy` for `target`.

    One query; none if `target` is a `Timeout`, or if its `TimeoutRelation` was prefetched whole.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `target` is not saved.
    """
    if isinstance(target, Timeout):
        return Countdown(target.due_at, target.state, clock.now(), target.pk)
    subject = subject_of(target, policy, key)
    kept = _prefetched(target, subject)
    if kept is None:
        for timeout_id, due_at, state, now in _current.rows(subject.using, slot=subject.slot):
            return Countdown(due_at, state, now, timeout_id)
    elif current := current_round(kept):
        return countdown_of(current)
    return Countdown(None, "", clock.now())


@compiled
def _current(using: str) -> QuerySet[Timeout, Any]:
    """Return the first of the rounds in this slot, as `Subject.rounds` orders them.

    The pending one is found by the unique index. The database sorts all rounds only if nothing is pending.
    """
    rows = Timeout.objects.using(using).filter(slot=param("slot"))
    pending = rows.filter(slot_taken=1).order_by(NEWEST_FIRST)
    newest = rows.order_by(F("slot_taken").desc(nulls_last=True), NEWEST_FIRST)
    first = Coalesce(Subquery(pending.values("id")[:1]), Subquery(newest.values("id")[:1]))
    return Timeout.objects.using(using).filter(pk=first).values_list("id", "due_at", "state", clock.DatabaseNow())


def pending_countdowns(objects: Sequence[M], policy: str | TimeoutPolicy[M], key: str = "") -> list[Countdown | None]:
    """Return the pending countdown of each of `objects`, in their order; None: nothing is pending.

    One query for up to five hundred objects; none for those whose `TimeoutRelation` was prefetched.

    Raises:
        UnknownPolicy, ValueError: as for `countdown_of`.
    """
    subjects = [subject_of(obj, policy, key) for obj in objects]
    found: dict[tuple[str, str], Countdown] = {}
    asked: dict[str, list[str]] = {}
    for obj, subject in zip(objects, subjects, strict=True):
        kept = _prefetched(obj, subject)
        if kept is None:
            asked.setdefault(subject.using, []).append(subject.slot)
        else:
            found |= {(subject.using, row.slot): countdown_of(row) for row in kept if row.slot_taken}
    for using, slots in asked.items():
        for chunk in chunks(slots):  # by the unique index of slots
            rows = Timeout.objects.using(using).filter(slot__in=chunk, slot_taken=1)
            for slot, *values in rows.values_list("slot", "due_at", "state", clock.DatabaseNow(), "id"):
                found[using, slot] = Countdown(*values)
    return [found.get((subject.using, subject.slot)) for subject in subjects]


def _prefetched(obj: Model, subject: Subject) -> list[Timeout] | None:
    """Return the rounds of `subject` among the timeouts that were prefetched with `obj`; None: not all of them were."""
    kept = getattr(obj, "_prefetched_objects_cache", {})
    for field in obj._meta.private_fields if kept else ():
        if isinstance(field, TimeoutRelation) and field.name in kept:
            rows = kept[field.name]
            if len(rows.query.where.children) > 1:
                return None  # filtered by more than the object, as by `Prefetch`
            if rows.db != subject.using or any(row._state.db != subject.using for row in rows):
                return None  # read from a replica, which may be behind
            return [row for row in rows if row.slot == subject.slot]
    return None


class _KindOf(Expression):
    """The id of a content type in the database that executes the query, which may be a shard with ids of its own."""

    output_field = IntegerField()

    def __init__(self, table: type[Model]) -> None:
        super().__init__()
        self.table = table

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[int]]:
        return "%s", (kind_of(self.table, connection.alias),)


class Deadline(Expression):
    """The pending deadline of each row of a query, for `annotate`, `filter` and `order_by`; NULL: nothing is pending.

    `Order.objects.annotate(due=Deadline("cancel_unpaid")).order_by("due")`
    """

    output_field = NullableDateTimeField(null=True)

    def __init__(self, policy: str | TimeoutPolicy[Any], key: str = "") -> None:
        super().__init__()
        self.policy, self.key = policy, key

    def resolve_expression(self, query: Any = None, *args: Any, **options: Any) -> Any:
        """Return the subquery. Raises UnknownPolicy."""
        policy = resolve_policy(self.policy, query.model)
        table, using = policy.concrete_model, database_of(policy.concrete_model)
        rows = Timeout.objects.filter(
            policy__in=policy.labels,
            content_type=_KindOf(table),
            object_id=object_id(OuterRef(cast("Any", table._meta.pk).name), table, using),
            key=self.key,
            slot_taken=1,
        )
        found = Subquery(rows.order_by("-id").values("due_at")[:1], output_field=DateTimeField())
        return found.resolve_expression(query, *args, **options)
