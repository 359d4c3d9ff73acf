"""Arm, move or cancel the timeouts of objects that are saved or deleted, in the same transaction.

One object at a time by Django's signals; many by a manager, whose bulk writes send none. `bulk_update` and the async
methods call its `bulk_create` and `update`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from django.apps import apps
from django.db import connections, transaction
from django.db.models import Manager, Model, QuerySet, UniqueConstraint
from django.db.models.signals import class_prepared, post_delete, post_save, pre_delete, pre_save

from django_delayq.arming import watched
from django_delayq.arming.reconcile import arm_one
from django_delayq.arming.sync import cancel_of_deleted, sync_timeouts
from django_delayq.ledger.locking import lock_keys, lock_parents, rows_of, transaction_of
from django_delayq.ledger.routing import has_timeouts
from django_delayq.ledger.subjects import renew_slot
from django_delayq.models import Timeout
from django_delayq.policy.policies import M, get_policies
from django_delayq.policy.reads import policies_by_table
from django_delayq.sql.statements import chunks

if TYPE_CHECKING:
    from django_delayq.policy.watches import Watch


def connect() -> None:
    """Connect to saves and deletes of all models with policies, their proxies and children.

    The receivers are connected for each model, because one for all models would prevent Django's fast bulk deletes of
    models without policies. Called again for each policy that is declared after the start.
    """
    for model in apps.get_models(include_auto_created=True):
        _connect_to(model)
    # Proxies and children may be loaded later: in an `admin.py` whose app comes after this one, or in a function.
    class_prepared.connect(_connect_to, dispatch_uid="django_delayq.connect")
    pre_save.connect(renew_slot, Timeout, dispatch_uid="django_delayq.renew_slot")


def _connect_to(sender: type[Model], **_: Any) -> None:
    """Connect to saves and deletes of a model, if it has policies, or policies read its rows.

    The models of migrations have none.
    """
    watched.connect_to(sender)
    policies = get_policies(sender)
    # Deleting a multi-table child deletes its parent's row too, and sends the parent's signals.
    if any(policy.concrete_model is sender._meta.concrete_model for policy in policies):
        pre_delete.connect(note_deletion, sender, dispatch_uid="django_delayq.note_deletion")
        post_delete.connect(cancel_deleted, sender, dispatch_uid="django_delayq.cancel_deleted")
    if any(policy.is_automatic for policy in policies):
        post_save.connect(arm_saved, sender, dispatch_uid="django_delayq.arm_saved")
        if _table(sender)._meta.parents:
            pre_save.connect(lock_parents_first, sender, dispatch_uid="django_delayq.lock_parents_first")


def lock_parents_first(
    sender: type[Model],
    instance: Model,
    using: str,
    *,
    raw: bool = False,
    update_fields: Collection[str] | None = None,
    **_: Any,
) -> None:
    """Lock the parents' rows of a multi-table child before a save that updates only the child's own table.

    Arming locks them anyway. After the child's row it would deadlock with a save of all columns, which locks the
    parents first. Outside a transaction the child's row is free again when arming begins.
    """
    if raw or update_fields is None or instance.pk is None or not connections[using].in_atomic_block:
        return
    topmost = _table(sender)._meta.all_parents[-1]
    is_locked = any({field.name, field.attname} & set(update_fields) for field in topmost._meta.local_concrete_fields)
    if not is_locked and policies_by_table(sender, update_fields) and has_timeouts(sender, instance, using):
        lock_parents(_table(sender), [instance.pk], using)


def arm_saved(
    sender: type[Model],
    instance: Model,
    using: str,
    *,
    raw: bool = False,
    created: bool = False,
    update_fields: Collection[str] | None = None,
    **_: Any,
) -> None:
    """Arm, move or cancel after a save. `raw` saves (fixtures) wait for `sync`: related rows may not exist yet."""
    if raw:
        return
    for policies in policies_by_table(sender, update_fields):
        if not has_timeouts(sender, instance, using):
            return
        arm_one(policies, policies[0].pk_of(instance), using, is_new=created)


# For each connection and table, by key, the objects whose deletion has begun. The deletion itself keeps them alive, so
# one that failed or was rolled back leaves no keys behind.
_being_deleted: WeakKeyDictionary[Any, dict[type[Model], WeakValueDictionary[Any, Model]]] = WeakKeyDictionary()


def note_deletion(sender: type[Model], instance: Model, using: str, *, origin: Any = None, **_: Any) -> None:
    """Note the key of a row before its deletion, so that deleting a thousand rows cancels once.

    Lock the parents' rows of a multi-table child first, as everywhere: Django deletes the child's row before them. Not
    for each row of a queryset or a cascade.
    """
    if has_timeouts(sender, instance, using):
        lock_parents(_table(sender), [instance.pk] if getattr(origin, "pk", None) == instance.pk else [], using)
        by_table = _being_deleted.setdefault(connections[using], {})
        by_table.setdefault(_table(sender), WeakValueDictionary())[instance.pk] = instance


def cancel_deleted(sender: type[Model], instance: Model, using: str, **_: Any) -> None:
    """Cancel for all noted keys after the first row's deletion, when the statement has deleted all rows.

    Keys whose rows are still in the table stay noted: another statement deletes the rows of a proxy, and a receiver of
    `pre_delete` may delete other rows of the table first.
    """
    noted = _being_deleted.get(connections[using], {}).get(_table(sender))
    if noted is not None and instance.pk in noted:
        pks = set(noted)
        for pk in pks - cancel_of_deleted(_table(sender), pks, using)[1]:  # without those that are still there
            noted.pop(pk, None)


def _table(model: type[Model]) -> type[Model]:
    return cast("type[Model]", model._meta.concrete_model)


class ArmingQuerySet(QuerySet[M]):
    """A queryset that arms after `bulk_create`, `bulk_update` and `update`, in the same transaction.

    Use `ArmingManager`, or make it the first base class of your own queryset. Models without automatic policies, and
    updates of columns that no policy reads, cost nothing. Sends no signals.
    """

    def bulk_create(  # noqa: PLR0917 - Django's signature
        self,
        objs: Iterable[M],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> list[M]:
        """Insert `objs` and arm their timeouts.

        Raises:
            ValueError: the keys of the written rows would be unknown; nothing is written.
        """
        objects = list(objs)
        given: dict[str, Any] = {"batch_size": batch_size, "ignore_conflicts": ignore_conflicts}
        given |= {"update_conflicts": update_conflicts, "update_fields": update_fields, "unique_fields": unique_fields}
        using = self._armed_in(None)
        if using is None:
            return super().bulk_create(objects, **given)
        if policies_by_table(self.model):
            self._check_keys(objects, using, ignore_conflicts, update_conflicts and not self._is_key(unique_fields))
        watches = self._watches(None, using)
        owners = watched.owners_by_values(watches, objects, using)
        if update_conflicts:
            owners.update(watched.owners_by_keys(watches, [obj.pk for obj in objects if obj.pk is not None], using))
        # After an error the caller's transaction must be rolled back.
        with transaction_of(using), transaction.atomic(using=using, savepoint=False):
            owners.lock(using)
            created = super().bulk_create(objects, **given)
            if policies_by_table(self.model):
                sync_timeouts(objects)
            owners.arm(using)
        return created

    def update(self, **values: Any) -> int:
        """Update the rows; arm, move and cancel their timeouts.

        The rows are locked first, in the order of their keys, as everywhere. A row that begins to match while they are
        being locked is not updated, or, with more than 500 rows, its timeouts are left to the workers' next sync.
        """
        using = self._armed_in(values.keys())
        if using is None or self.query.is_sliced or self.query.combinator or self.query.distinct_fields:
            return super().update(**values)
        with transaction_of(using), transaction.atomic(using=using, savepoint=False):
            keys = list(dict.fromkeys(self.using(using).order_by("pk").values_list("pk", flat=True)))
            pages, watches = list(chunks(keys)), self._watches(values, using)
            owners = watched.owners_by_keys(watches, keys, using)
            owners.lock(using)
            for page in pages:
                lock_keys(self.model, page, using)
            # One statement, because the condition may read what the statement changes. It is evaluated again on the
            # locked rows.
            rows = self.filter(pk__in=keys) if len(pages) <= 1 else self
            updated = super(ArmingQuerySet, rows).update(**values)
            owners.update(watched.owners_by_keys(watches, keys, using))  # some may belong to others now
            for page in pages:
                sync_timeouts(rows_of(self.model, using).filter(pk__in=page))
            owners.arm(using)
        self._result_cache = None
        return updated

    def bulk_update(self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None) -> int:
        """Update `fields` of `objs`, and arm as `update` does. The owners are locked before the first batch."""
        objects, names = list(objs), list(fields)
        self._for_write = True
        with transaction.atomic(using=self.db, savepoint=False):
            self.filter(pk__in=[obj.pk for obj in objects])._lock_owners(names)
            return super().bulk_update(objects, names, batch_size)

    def iterator(self, chunk_size: int | None = None) -> Iterator[Any]:
        """Return an iterator over the rows, whose owners are locked as when they are read at once."""
        self._lock_owners_first()
        return super().iterator(chunk_size)

    def _fetch_all(self) -> None:
        if self._result_cache is None:
            self._lock_owners_first()
        super()._fetch_all()

    def _lock_owners_first(self) -> None:
        """Lock the owners of the rows if reading will lock the rows, as in `update_or_create()`."""
        query = self.query
        if query.select_for_update and not (query.select_for_update_nowait or query.select_for_update_skip_locked):
            self._lock_owners()

    def _lock_owners(self, names: Collection[str] | None = None) -> None:
        """In a transaction, lock the objects to which the rows belong by the columns `names`, as saving them does."""
        if connections[self.db].in_atomic_block and (watches := self._watches(names, self.db)):
            rows = self.all()
            rows.query.select_for_update = False
            watched.owners_by_keys(watches, rows.values_list("pk", flat=True), self.db).lock(self.db)

    def _armed_in(self, names: Collection[str] | None) -> str | None:
        """Return the database to which this queryset writes; None: no timeouts depend on the fields `names` there."""
        self._for_write = True
        is_own = policies_by_table(self.model, names) and has_timeouts(self.model, self._row(), self.db)
        return self.db if is_own or self._watches(names, self.db) else None

    def _watches(self, names: Collection[str] | None, using: str) -> list[Watch]:
        """Return what policies watch of the fields `names` of this model, in the database `using`."""
        return watched.watches_for(self.model, self._row(), using, names)

    def _row(self) -> M:
        row = self.model()
        row._state.db = self.db
        return row

    def _is_key(self, target: Collection[str] | None) -> bool:
        """Return whether only the primary key can conflict in an upsert with the unique fields `target`."""
        meta: Any = self.model._meta
        if target:
            return {*target} <= {"pk", meta.pk.name, meta.pk.attname}
        constraints = [each for each in meta.constraints if isinstance(each, UniqueConstraint)]
        return not (constraints or meta.unique_together or any(x.unique for x in meta.concrete_fields if x != meta.pk))

    def _check_keys(self, objects: list[M], using: str, ignore_conflicts: bool, may_have_other_key: bool) -> None:
        """Raise ValueError if the keys of the rows would be unknown."""
        has_key = [obj.pk is not None and not hasattr(obj.pk, "resolve_expression") for obj in objects]
        returns_keys = connections[using].features.can_return_rows_from_bulk_insert and not ignore_conflicts
        if not all(has_key) and not returns_keys:
            source = "ignore_conflicts=True" if ignore_conflicts else f"database {using!r}"
            words = f"the keys of the new rows are unknown, because {source} does not return them"
        elif any(has_key) and may_have_other_key:
            words = "a row that exists keeps its own key, and not that of the object"
        else:
            return
        name = self.model.__name__
        raise ValueError(
            f"bulk_create() of {name} cannot arm timeouts: {words}. Use {name}._base_manager.bulk_create(), and then "
            "sync_timeouts() with a queryset that finds the rows."
        )


class ArmingManager(Manager[M]):
    """A manager with the methods of `ArmingQuerySet`: `objects = ArmingManager()`."""

    _queryset_class = ArmingQuerySet  # what `from_queryset` replaces

    if TYPE_CHECKING:

        def get_queryset(self) -> ArmingQuerySet[M]: ...

    else:  # the stubs know Django's own

        @classmethod
        def from_queryset(cls, queryset_class, class_name=None):
            """Return a manager class with the methods of `queryset_class`, as Django does. Raises TypeError."""
            if not issubclass(queryset_class, ArmingQuerySet):
                raise TypeError(f"{queryset_class.__name__} must derive from ArmingQuerySet, as its first base class.")
            return super().from_queryset(queryset_class, class_name)
