"""Read what is pending: rows, one deadline, or a deadline as a column of your own query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.contrib.contenttypes.models import ContentType
from django.db.models import Expression, F, Model, OuterRef, Q, QuerySet, Subquery
from django.db.models.fields import DateTimeField

from django_delayq.exceptions import UnknownPolicy
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.subjects import object_id_of, subject_of
from django_delayq.models import Timeout
from django_delayq.object_ids import object_id
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
        target: an object, a model, a queryset or an iterable of objects of one model; None: all.
        policy: a policy, its label, or with a target its name; None: all.
        key: only this key; None: all.

    Raises:
        UnknownPolicy: no such policy, or a bare name without a target that says whose.
        ValueError: an object is not saved.
        TypeError: the objects are of several models, or no objects of a model.
    """
    model, pks = _model_and_keys(target)
    rows = Timeout.objects.pending().order_by("run_at", "id")
    if model is not None:
        rows = rows.using(database_of(model, target if isinstance(target, Model) else None))
    tables = [] if model is None else _tables(model)
    if policy is not None:
        found = _policy(policy, model)
        rows = rows.of_labels(found.labels)
        tables = [table for table in tables if table is found.concrete_model]
    if target is not None:
        rows = _of_objects(rows, model, tables, pks)
    return rows if key is None else rows.filter(key=key)


def _tables(model: type[Model]) -> list[type[Model]]:
    """The models whose policies concern objects of `model`: its own table's, and those of its parents."""
    own = cast("type[Model]", model._meta.concrete_model)
    return [own, *own._meta.all_parents]


def _policy(policy: str | TimeoutPolicy[Any], model: type[Model] | None) -> TimeoutPolicy[Any]:
    if model is not None:
        return resolve_policy(policy, model)
    if isinstance(policy, TimeoutPolicy):
        return policy
    if "." not in policy:
        raise UnknownPolicy(f"{policy!r} without a target could be any model's: give its label, app.model.name.")
    return get_policy(policy)


def _model_and_keys(target: Target) -> tuple[type[Model] | None, Any]:
    """The model that `target` is of, and its keys: a list, a queryset, or None for all."""
    if target is None:
        return None, None
    if isinstance(target, type):
        return target, None
    if isinstance(target, QuerySet):
        return target.model, target
    objects = [target] if isinstance(target, Model) else list(target)
    kinds = {obj._meta.concrete_model for obj in objects if isinstance(obj, Model)}
    if len(kinds) > 1 or any(not isinstance(obj, Model) for obj in objects):
        raise TypeError("The objects must be saved instances of one model.")
    for obj in objects:
        if obj.pk is None:
            raise ValueError(f"{obj!r} is not saved: its timeouts are kept by its primary key.")
    kind = type(target) if isinstance(target, Model) else next(iter(kinds), None)
    return kind, [obj.pk for obj in objects]


def _of_objects(
    rows: TimeoutQuerySet, model: type[Model] | None, tables: list[type[Model]], pks: Any
) -> TimeoutQuerySet:
    """Those of `rows` about the objects `pks` of `model`. No objects means no rows, and never all of them."""
    if model is None:
        return rows.none()
    wanted = Q(pk__in=[])
    for table in tables:
        kind = Q(content_type=ContentType.objects.db_manager(rows.db).get_for_model(table).pk)
        keys = pks
        if pks is None and table is not model._meta.concrete_model:  # of the parent's rows, only the children's
            keys = model._base_manager.using(rows.db).all()
        wanted |= kind & _with_ids(keys, table, rows.db)
    return rows.filter(wanted)


def _with_ids(keys: Any, table: type[Model], using: str) -> Q:
    if keys is None:
        return Q()
    if isinstance(keys, QuerySet):
        plain = keys if keys.query.is_sliced else keys.order_by()
        return Q(object_id__in=plain.annotate(delayq_id=object_id(F("pk"), table, using)).values("delayq_id"))
    return Q(object_id__in=[object_id_of(table, pk) for pk in keys])


def get_deadline(obj: M, policy: str | TimeoutPolicy[M], key: str = "") -> datetime | None:
    """When the pending timeout of `obj` is due; None: nothing is pending.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    return subject_of(obj, policy, key).pending().values_list("due_at", flat=True).first()


async def aget_deadline(obj: M, policy: str | TimeoutPolicy[M], key: str = "") -> datetime | None:
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
