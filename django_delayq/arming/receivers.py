"""A model is saved or deleted: arm, move or cancel its timeouts in the same transaction."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save

from django_delayq.arming.reconcile import arm_many, arm_one, cancel_of_deleted
from django_delayq.conf import get_settings
from django_delayq.key_types import root_of_key
from django_delayq.ledger.locking import database_of, has_ledger, lock_parents, writer_of
from django_delayq.policies import get_policies, registry
from django_delayq.policy_rules import columns_read

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from datetime import timedelta

    from django.db.models import Model

    from django_delayq.policies import TimeoutPolicy


FEWEST_TOGETHER = 5
"""Fewer objects are armed one by one, because those queries are compiled once."""


class TablePolicies(NamedTuple):
    """Automatic policies that depend on the same table."""

    table: type[Model]
    policies: tuple[TimeoutPolicy[Any], ...]
    fields: frozenset[str] | None
    """The names of the fields that decide on arming; None: every save may change the decision."""


_by_model: dict[type[Model], list[TablePolicies]] = {}
_version = -1


def connect() -> None:
    """Connect to saves and deletes of all models with policies, their proxies and children.

    The receivers are connected for each model, because one for all models would prevent Django's fast bulk deletes of
    models without policies. May be called again when a policy has been declared late.
    """
    for model in apps.get_models():
        policies = get_policies(model)
        # Deleting a multi-table child deletes its parent's row too, and sends the parent's signals.
        if any(policy.concrete_model is model._meta.concrete_model for policy in policies):
            pre_delete.connect(note_deletion, model, dispatch_uid="django_delayq.note_deletion")
            post_delete.connect(cancel_deleted, model, dispatch_uid="django_delayq.cancel_deleted")
        if any(policy.is_automatic for policy in policies):
            post_save.connect(arm_saved, model, dispatch_uid="django_delayq.arm_saved")
            if _table(model)._meta.parents:
                pre_save.connect(lock_parents_first, model, dispatch_uid="django_delayq.lock_parents_first")


def policies_by_table(model: type[Model]) -> list[TablePolicies]:
    """Return the automatic policies that a save of `model` concerns, grouped by table."""
    global _version  # noqa: PLW0603 - one cache per process, cleared when policies are added or removed
    if _version != registry.version:
        _by_model.clear()
        _version = registry.version
    found = _by_model.get(model)
    if found is None:
        by_table: dict[type[Model], list[TimeoutPolicy[Any]]] = {}
        for policy in get_policies(model):
            if policy.is_automatic:
                by_table.setdefault(policy.concrete_model, []).append(policy)
        found = _by_model[model] = []
        for table, policies in by_table.items():
            read = [columns_read(policy) for policy in policies]
            known = [fields for fields in read if fields is not None]
            fields = frozenset[str]().union(*known) if len(known) == len(read) else None
            found.append(TablePolicies(table, tuple(policies), fields))
    return found


def concerned_by(model: type[Model], names: Collection[str] | None) -> list[TablePolicies]:
    """Return the automatic policies that a write of the fields `names` of `model` concerns; None: of all fields."""
    found = policies_by_table(model)
    if names is None:
        return found
    return [each for each in found if each.fields is None or each.fields & set(names)]


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
    connection = connections[using]
    if raw or update_fields is None or instance.pk is None or not connection.in_atomic_block:
        return
    topmost = _table(sender)._meta.all_parents[-1]
    is_locked = any({field.name, field.attname} & set(update_fields) for field in topmost._meta.local_concrete_fields)
    if is_locked or not connection.features.has_select_for_update or not concerned_by(sender, update_fields):
        return
    if has_timeouts(sender, instance, using):
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
    for table, policies, _fields in concerned_by(sender, update_fields):
        if not has_timeouts(sender, instance, using):
            return
        key: Any = table._meta.pk  # a multi-table child may have a different key of its own
        pk, oldest = getattr(instance, key.attname), get_settings().catch_up
        if (later := _later.get(connections[using])) is not None:
            later.note(table, policies, pk, oldest)
        else:
            arm_one(table, policies, pk, using, oldest, is_new=created)


_Noted: TypeAlias = dict[tuple[type["Model"], tuple["TimeoutPolicy[Any]", ...], "timedelta"], set[Any]]


class ArmingLater:
    """Objects that handlers have saved in the transaction in which a worker fires a group of timeouts.

    They are armed together at its end.

    To read the states of fifty objects costs little more than to read that of one. Only the state at the end of the
    transaction matters, and `arm` is called before any other statement that concerns the ledger.
    """

    def __init__(self, using: str) -> None:
        self.is_arming = False
        self._using = using
        self._noted: _Noted = {}
        self._armed: _Noted = {}

    def note(self, table: type[Model], policies: tuple[TimeoutPolicy[Any], ...], pk: Any, oldest: timedelta) -> None:
        """Have the object armed by the next `arm`, as `arm_one` does."""
        self._noted.setdefault((table, policies, oldest), set()).add(pk)

    def arm(self) -> None:
        """Arm, move or cancel for the noted objects. Raises what a callable of a policy raises, or the database."""
        noted, self._noted = self._noted, {}
        self.is_arming = True
        try:
            for (table, policies, oldest), found in noted.items():
                self._armed.setdefault((table, policies, oldest), set()).update(found)
                pks = sorted(set(map(root_of_key(table).to_python, found)))
                if len(pks) >= FEWEST_TOGETHER:
                    arm_many(table, policies, pks, self._using, oldest, signals=True)
                else:
                    for pk in pks:
                        arm_one(table, policies, pk, self._using, oldest)
        finally:
            self.is_arming = False

    def arm_again(self) -> None:
        """Note all objects again: a savepoint was rolled back, and with it perhaps what `arm` has written."""
        for (table, policies, oldest), found in self._armed.items():
            self._noted.setdefault((table, policies, oldest), set()).update(found)
        self._armed.clear()


_later: WeakKeyDictionary[Any, ArmingLater] = WeakKeyDictionary()


@contextmanager
def arming_later(using: str) -> Iterator[ArmingLater]:
    """Note what this thread saves in database `using` instead of arming it, until the block ends.

    The caller calls `arm`, or rolls the transaction back.
    """
    connection = connections[using]
    outer, later = _later.get(connection), ArmingLater(using)
    _later[connection] = later
    try:
        yield later
    finally:
        if outer is None:
            del _later[connection]
        else:
            _later[connection] = outer


def has_timeouts(sender: type[Model], instance: Model, using: str) -> bool:
    """Return whether `using`, to which `instance` was written, is the database that has its timeouts.

    Copies that the application writes to another database, such as an archive, have none. Raises ConfigError if the
    routers separate the model from the ledger.
    """
    if not router.routers and using == instance._state.db == DEFAULT_DB_ALIAS:
        return True  # by far the most frequent case
    is_home = using == writer_of(sender)
    if not is_home and (writer_of(sender, instance) != using or not has_ledger(using)):
        return False
    return database_of(sender, instance) == using


# For each connection and table, by key, the objects whose deletion has begun. The deletion itself keeps them alive, so
# one that failed or was rolled back leaves no keys behind.
_being_deleted: WeakKeyDictionary[Any, dict[type[Model], WeakValueDictionary[Any, Model]]] = WeakKeyDictionary()


def note_deletion(sender: type[Model], instance: Model, using: str, **_: Any) -> None:
    """Note the key of a row before its deletion, so that deleting a thousand rows cancels once."""
    if has_timeouts(sender, instance, using):
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
        left = cancel_of_deleted(_table(sender), pks, using).left
        for pk in pks - left:
            noted.pop(pk, None)


def _table(model: type[Model]) -> type[Model]:
    return cast("type[Model]", model._meta.concrete_model)
