"""A model is saved or deleted: arm, move or cancel its timeouts, in the saver's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from django.apps import apps
from django.db import connections
from django.db.models.signals import post_delete, post_save, pre_delete

from django_delayq.arming.reconcile import arm_one, cancel_of_deleted
from django_delayq.conf import get_settings
from django_delayq.ledger.locking import database_of, has_ledger, writer_of
from django_delayq.policies import get_policies, registry
from django_delayq.policy_rules import columns_read

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from django.db.models import Model

    from django_delayq.policies import TimeoutPolicy

Group = tuple["type[Model]", tuple["TimeoutPolicy[Any]", ...], "frozenset[str] | None"]
_groups: dict[type[Model], list[Group]] = {}
_version = -1


def connect() -> None:
    """From now on saves and deletes of the models with policies, their proxies and children, arm and cancel.

    Connected model by model, because a listener for all models would take Django's fast bulk deletes away
    from models that have no policy. May be called again when a policy has been declared late.
    """
    for model in apps.get_models():
        policies = get_policies(model)
        # Deleting a multi-table child deletes its parent's row too, and says so in the parent's name.
        if any(policy.concrete_model is model._meta.concrete_model for policy in policies):
            pre_delete.connect(note_deletion, model, dispatch_uid="django_delayq.note_deletion")
            post_delete.connect(cancel_deleted, model, dispatch_uid="django_delayq.cancel_deleted")
        if any(policy.is_automatic for policy in policies):
            post_save.connect(arm_saved, model, dispatch_uid="django_delayq.arm_saved")


def groups_of(model: type[Model]) -> list[Group]:
    """The automatic policies that a save of `model` concerns, by the table they look at.

    With each: the fields that decide, or None where every save may matter.
    """
    global _version  # noqa: PLW0603 - one cache per process, dropped when policies come or go
    if _version != registry.version:
        _groups.clear()
        _version = registry.version
    found = _groups.get(model)
    if found is None:
        found = _groups[model] = list(_grouped(model))
    return found


def _grouped(model: type[Model]) -> Iterator[Group]:
    by_table: dict[type[Model], list[TimeoutPolicy[Any]]] = {}
    for policy in get_policies(model):
        if policy.is_automatic:
            by_table.setdefault(policy.concrete_model, []).append(policy)
    for table, policies in by_table.items():
        read = [columns_read(policy) for policy in policies]
        known = [fields for fields in read if fields is not None]
        yield table, tuple(policies), frozenset().union(*known) if len(known) == len(read) else None


def arm_saved(
    sender: type[Model],
    instance: Model,
    using: str,
    raw: bool = False,
    update_fields: Collection[str] | None = None,
    **_: Any,
) -> None:
    """After a save. `raw` saves (fixtures) are left to `sync`: their related rows may not exist yet."""
    if raw:
        return
    for table, policies, fields in groups_of(sender):
        if update_fields is not None and fields is not None and not fields & set(update_fields):
            continue
        if not _has_timeouts(sender, instance, using):
            return
        arm_one(table, policies, policies[0].pk_of(instance), using, get_settings().catch_up)


def _has_timeouts(sender: type[Model], instance: Model, using: str) -> bool:
    """Return whether `using`, to which `instance` was written, is the database in which its timeouts are.

    A copy in an archive, or whatever else the application writes with `using`, has none. Raises ConfigError where
    the routers separate the model from the ledger.
    """
    is_home = using == writer_of(sender)
    if not is_home and (writer_of(sender, instance) != using or not has_ledger(using)):
        return False
    return database_of(sender, instance) == using


# Per connection and table: the keys of rows that a delete under way has announced.
_announced: WeakKeyDictionary[Any, dict[type[Model], set[Any]]] = WeakKeyDictionary()


def note_deletion(sender: type[Model], instance: Model, using: str, **_: Any) -> None:
    """Before a delete, row by row: only noted, so that a thousand rows cost one cancelling and not a thousand."""
    if not _has_timeouts(sender, instance, using):
        return
    by_table = _announced.setdefault(connections[using], {})
    by_table.setdefault(_table(sender), set()).add(instance.pk)


def cancel_deleted(sender: type[Model], using: str, **_: Any) -> None:
    """After the first row of a delete, when the statement has taken all of them: cancel all that was noted.

    Notes of a delete that failed half-way may be among them; they are checked against the table.
    """
    pks = _announced.get(connections[using], {}).pop(_table(sender), None)
    if pks:
        cancel_of_deleted(_table(sender), pks, using)


def _table(model: type[Model]) -> type[Model]:
    return cast("type[Model]", model._meta.concrete_model)
