"""Read pending timeouts: as rows, one deadline, or a deadline as a column of a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.db.models import Expression, IntegerField, Model, OuterRef, QuerySet, Subquery
from django.db.models.fields import DateTimeField

from django_delayq.arming.holding import Facts, Progress
from django_delayq.exceptions import UnknownPolicy
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import (
    about_model,
    about_objects,
    check_key,
    instances,
    kind_of,
    object_id,
    order_matters,
    subject_of,
    tables_of,
)
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.policy.policies import M, TimeoutPolicy, get_policy, policies_named, resolve_policy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

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

    Also those whose clock is stopped, of which `state` is `held`: they come last.

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
    rows = Timeout.objects.using(using).waiting().order_by("run_at", "id")
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

    If its clock is stopped: its last deadline, which it does not keep.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    return subject_of(obj, policy, key).pending().values_list("due_at", flat=True).first()


aget_deadline = sync_to_async(get_deadline)


def get_progress(obj: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> Progress | None:
    """Return how much of its time the unsettled timeout of `obj` has used, and has left. `obj` may be a `Timeout`.

    The time begins at `since`, or at the scheduling if there is no `since` before the deadline. It counts as the
    deadline does: open hours for `Working`, and nothing while the clock is stopped, also by a hold of the policy.

    Returns:
        A `Progress`. None: no timeout is unsettled, its policy is no longer declared, or the calendar raises.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    subject = subject_of(obj, policy, key)
    row = subject.rounds().filter(settled_at=None).first()
    return None if row is None else Facts([row], subject.using, locks=False).progress(row)


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
