"""Read what is pending: rows, one deadline, or a deadline as a column of your own query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.contrib.contenttypes.models import ContentType
from django.db.models import Expression, Model, OuterRef, Q, QuerySet, Subquery
from django.db.models.fields import DateTimeField

from django_delayq.exceptions import UnknownPolicy
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.subjects import about, instances, kind_of, object_id, subject_of, tables_of
from django_delayq.models import Timeout
from django_delayq.policies import M, TimeoutPolicy, get_policy, resolve_policy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from django_delayq.models import TimeoutQuerySet

    class NullableDateTimeField(DateTimeField[Any, Any]):
        """What an annotation with `Deadline` is to type checkers: a row may have none pending."""

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
    """The pending timeouts of `target` and `policy`, soonest first, as a queryset.

    Args:
        target: an object, a model, a queryset or an iterable of objects of one model; None: all. Timeouts, one or
            several or a queryset of them: those that are pending.
        policy: a policy, its label, or with a target its name; None: all.
        key: only this key; None: all.

    Raises:
        UnknownPolicy: no such policy, or a bare name without a target that says whose.
        ValueError: an object is not saved.
        TypeError: the objects are of several models, or no objects of a model.
    """
    model, objects = _model_and_objects(target)
    source = objects[0] if isinstance(objects, list) and objects else target if isinstance(target, QuerySet) else None
    using = database_of(Timeout if model is None else model, source)
    rows = Timeout.objects.using(using).pending().order_by("run_at", "id")
    if model is Timeout:
        target, model = None, None
        if isinstance(objects, QuerySet):
            rows = rows.filter(pk__in=objects.using(using))
        elif objects is not None:
            rows = rows.filter(pk__in=[row.pk for row in objects])
    tables = [] if model is None else tables_of(model)
    if policy is not None:
        found = _policy(policy, model)
        rows = rows.of_labels(found.labels)
        tables = [table for table in tables if table is found.concrete_model]
    if target is not None:
        rows = rows.none() if model is None else rows.filter(_of_tables(tables, model, objects, rows.db))
    return rows if key is None else rows.filter(key=key)


def _policy(policy: str | TimeoutPolicy[Any], model: type[Model] | None) -> TimeoutPolicy[Any]:
    if model is not None:
        return resolve_policy(policy, model)
    if isinstance(policy, TimeoutPolicy):
        return policy
    if "." not in policy:
        raise UnknownPolicy(f"{policy!r} without a target could be any model's: give its label, app.model.name.")
    return get_policy(policy)


def _of_tables(
    tables: list[type[Model]], model: type[Model], objects: QuerySet[Any] | list[Model] | None, using: str
) -> Q:
    """Return the condition on rows of `tables` about `objects` of `model`, or about all of them."""
    if objects is not None:
        return about(tables, objects, using)
    parents = [table for table in tables if table is not model._meta.concrete_model]
    # Of the parents' rows only those about children.
    wanted = about(parents, model._base_manager.using(using).all(), using)
    return wanted if parents == tables else wanted | Q(content_type=kind_of(model, using))


def _model_and_objects(target: Target) -> tuple[type[Model] | None, QuerySet[Any] | list[Model] | None]:
    """Return the model of `target`, and its objects: a list, a queryset, or None for all."""
    if target is None:
        return None, None
    if isinstance(target, type):
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
    kind = type(target) if isinstance(target, Model) else next(iter(kinds), None)
    return kind, objects


def get_deadline(obj: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> datetime | None:
    """When the pending timeout of `obj` is due; None: nothing is pending. `obj` may be a `Timeout` itself.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    return subject_of(obj, policy, key).pending().values_list("due_at", flat=True).first()


async def aget_deadline(obj: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> datetime | None:
    """`get_deadline` for async code."""
    return await sync_to_async(get_deadline)(obj, policy, key)


class Deadline(Expression):
    """The pending deadline of each row of a query, for `annotate`, `filter` and `order_by`; NULL: none.

    `Order.objects.annotate(due=Deadline("cancel_unpaid")).order_by("due")`
    """

    output_field = NullableDateTimeField(null=True)

    def __init__(self, policy: str | TimeoutPolicy[Any], key: str = "") -> None:
        super().__init__()
        self.policy, self.key = policy, key

    def resolve_expression(
        self,
        query: Any = None,
        allow_joins: bool = True,
        reuse: set[str] | None = None,
        summarize: bool = False,
        for_save: bool = False,
    ) -> Any:
        """The subquery that this stands for in `query`. Raises UnknownPolicy."""
        policy = resolve_policy(self.policy, query.model)
        table, using = policy.concrete_model, database_of(policy.concrete_model)
        pk = table._meta.pk
        assert pk is not None
        rows = Timeout.objects.filter(
            policy__in=policy.labels,
            content_type=ContentType.objects.db_manager(using).get_for_model(table).pk,
            object_id=object_id(OuterRef(pk.name), table, using),
            key=self.key,
            slot_taken=1,
        )
        found = Subquery(rows.order_by("-id").values("due_at")[:1], output_field=DateTimeField())
        return found.resolve_expression(query, allow_joins, reuse, summarize, for_save)
