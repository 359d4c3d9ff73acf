"""Arm, move or cancel the timeouts of objects when a row changes that their policy reads: a payment, a channel.

The objects are locked before that row is written, which is also the order of a firing. So of a payment and a deadline
at the same time one comes first, and neither waits for the other in a circle. Then they are compared as if they had
been saved. With more than `MOST` of them, the regular sync is asked to begin now: it finds all, page by page, and a
worker that dies loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, ref

from django.db import connections, transaction
from django.db.models import Model, QuerySet
from django.db.models.signals import m2m_changed, post_delete, post_save, pre_delete, pre_save

from django_delayq.arming.changes import Arming
from django_delayq.arming.reconcile import arm_many, arm_one
from django_delayq.conf import get_settings
from django_delayq.ledger.db_connections import explaining_deadlocks
from django_delayq.ledger.locking import begin_write, lock_keys, rows_of
from django_delayq.ledger.routing import has_timeouts
from django_delayq.ledger.subjects import kind_of
from django_delayq.models import PolicySync
from django_delayq.policy.watches import Hop, Watch, watches_on
from django_delayq.sql.key_types import pk_of, root_of_key
from django_delayq.sql.now import DatabaseNow
from django_delayq.sql.statements import chunks
from django_delayq.times.paths import is_reference

if TYPE_CHECKING:
    from django_delayq.policy.policies import TimeoutPolicy

MOST = 500
"""A save locks at most so many objects, so that it takes some 100 ms, and other requests wait no longer for them."""


@dataclass(slots=True)
class Owners:
    """The objects whose timeouts a write concerns, by table, and the policies that read the row that is written."""

    keys: dict[type[Model], set[Any]] = field(default_factory=dict)
    policies: dict[type[Model], set[TimeoutPolicy[Any]]] = field(default_factory=dict)

    def add(self, watch: Watch, keys: Iterable[Any]) -> None:
        """Add the objects `keys` of the policy of `watch`."""
        table = watch.policy.concrete_model
        if found := set(map(root_of_key(table).to_python, keys)):
            self.update(Owners({table: found}, {table: {watch.policy}}))

    def update(self, other: Owners) -> None:
        for table, keys in other.keys.items():
            self.keys.setdefault(table, set()).update(keys)
            self.policies.setdefault(table, set()).update(other.policies[table])

    def without(self, other: Owners) -> Owners:
        """Return those that are not in `other`."""
        left = {table: keys - other.keys.get(table, set()) for table, keys in self.keys.items()}
        return Owners({table: keys for table, keys in left.items() if keys}, self.policies)

    def _tables(self) -> list[type[Model]]:
        return sorted(self.keys, key=lambda table: table._meta.label)

    def lock(self, using: str) -> None:
        """Lock the objects until the transaction ends. Outside of one, and if there are too many, do nothing."""
        if connections[using].in_atomic_block:
            for table in self._tables():
                if len(self.keys[table]) <= MOST:
                    with explaining_deadlocks(table):
                        lock_keys(table, sorted(self.keys[table]), using)

    def arm(self, using: str) -> None:
        """Make the ledger fit the objects, as saving them would; of one object with signals."""
        for table in self._tables():
            automatic = (policy for policy in self.policies[table] if policy.is_automatic)
            policies, pks = sorted(automatic, key=lambda policy: policy.label), sorted(self.keys[table])
            if not policies:
                continue
            if len(pks) > MOST:
                ask_for_sync(policies, using)
            elif len(pks) == 1:
                arm_one(policies, pks[0], using)
            else:
                arm_many(policies, pks, Arming(using, get_settings().catch_up))


def ask_for_sync(policies: Iterable[TimeoutPolicy[Any]], using: str) -> None:
    """Have workers begin a pass of the sync of `policies` after the commit, and not after `SYNC_INTERVAL`.

    Not in the transaction, which would keep the row locked that workers write. If the process dies before it has asked,
    the next regular pass finds the same objects.
    """
    rows = PolicySync.objects.using(using).filter(policy__in=sorted(policy.label for policy in policies))
    transaction.on_commit(partial(rows.update, asked_at=DatabaseNow()), using=using, robust=True)


def owners_by_keys(watches: Iterable[Watch], keys: Iterable[Any], using: str) -> Owners:
    """Return the objects that the watched rows `keys` belong to, as the database has it now."""
    found, watches = Owners(), list(watches)
    for page in chunks([*dict.fromkeys(keys)] if watches else []):
        for watch in watches:
            rows = rows_of(watch.model, using).filter(pk__in=page)
            found.add(watch, _first(_back(watch.hops, rows, using)))
    return found


def lock_with_owners(obj: Model, using: str) -> None:
    """In a transaction, lock the objects that the row of `obj` belongs to, and then the row, as a save does."""
    if connections[using].in_atomic_block:
        begin_write(using)
        owners_by_keys(watches_for(type(obj), obj, using), [obj.pk], using).lock(using)
        lock_keys(type(obj), [obj.pk], using)


def owners_by_values(watches: Iterable[Watch], instances: Sequence[Model], using: str) -> Owners:
    """Return the objects that watched rows belong to by their own columns, as `instances` have them in memory."""
    found = Owners()
    for watch in watches:
        if not watch.hops[-1].is_forward:
            found.add(watch, _owners_of(watch, _sources(watch.hops[-1], instances, using), using))
    return found


def _owners_of(watch: Watch, values: Collection[Any], using: str) -> Collection[Any]:
    """Return the keys of the objects to which the last, reverse hop of `watch` leads by these `values`."""
    *before, last = watch.hops
    is_key = last.is_generic or last.field.target_field.primary_key
    if not values or (is_key and not before):  # no query
        return values
    rows = rows_of(last.source, using).filter(**{f"{'pk' if is_key else last.field.target_field.attname}__in": values})
    return _first(_back(before, rows, using))


def _first(rows: QuerySet[Any]) -> list[Any]:
    """Return the keys of `rows`, at most one more than may be locked."""
    return list(dict.fromkeys(rows.values_list("pk", flat=True)[: MOST + 1]))


def _sources(hop: Hop, instances: Iterable[Model], using: str) -> list[Any]:
    """Return the values by which instances of the target of a reverse `hop` name the rows of its source."""
    if not hop.is_generic:
        values = (getattr(obj, hop.field.attname) for obj in instances)
        return [value for value in dict.fromkeys(values) if value is not None]
    kind, found = kind_of(hop.source, using), []
    name = cast("Any", hop.target._meta.get_field(hop.field.content_type_field_name)).attname
    for obj in instances:
        if getattr(obj, name) == kind:
            with suppress(ValueError):  # no object of this model has such a key; MySQL refuses 0 for one that counts
                pk = pk_of(hop.source, str(getattr(obj, hop.field.object_id_field_name)))
                root_of_key(hop.source).get_db_prep_save(pk, connections[using])
                found.append(pk)
    return found


def _back(hops: Sequence[Hop], rows: QuerySet[Any], using: str) -> QuerySet[Any]:
    """Return the rows at the beginning of `hops` that `rows` at their end belong to, as one query."""
    for hop in reversed(hops):
        source = rows_of(hop.source, using)
        if hop.is_forward:
            rows = source.filter(**{f"{hop.field.attname}__in": rows.values(hop.field.target_field.attname)})
        elif not hop.is_generic:
            rows = source.filter(**{f"{hop.field.target_field.attname}__in": rows.values(hop.field.attname)})
        else:  # text, which the database would not compare with the keys
            rows = source.filter(pk__in=_sources(hop, rows, using))
    return rows


def watches_for(model: type[Model], instance: Model, using: str, names: Collection[str] | None = None) -> list[Watch]:
    """Return what policies watch of a row of `model` that is written to `using`, where their objects are, too."""
    found = watches_on(model, names)
    homes = {table: has_timeouts(table, instance, using) for table in {each.policy.concrete_model for each in found}}
    return [watch for watch in found if homes[watch.policy.concrete_model]]


def connect_to(sender: type[Model]) -> None:
    """Connect to writes of a model whose rows a policy reads."""
    if not watches_on(sender):
        return
    if _relation_through(sender) is not None:  # `add()` inserts its rows in bulk
        m2m_changed.connect(follow_relation, sender, dispatch_uid="django_delayq.follow_relation")
    if sender._meta.auto_created:
        return  # Django sends no other signals for its rows
    pre_save.connect(lock_owners, sender, dispatch_uid="django_delayq.lock_owners")
    post_save.connect(arm_owners, sender, dispatch_uid="django_delayq.arm_owners")
    pre_delete.connect(note_owners, sender, dispatch_uid="django_delayq.note_owners")
    post_delete.connect(arm_owners_of_deleted, sender, dispatch_uid="django_delayq.arm_owners_of_deleted")


def _relation_through(model: type[Model]) -> Any:
    """Return the many-to-many field whose rows `model` has; None: there is none."""
    linked = (field.related_model for field in model._meta.concrete_fields if is_reference(field))
    fields = (field for each in linked for field in cast("Any", each)._meta.local_many_to_many)
    return next((field for field in fields if field.remote_field.through is model), None)


def lock_owners(
    sender: type[Model],
    instance: Model,
    using: str,
    *,
    raw: bool = False,
    update_fields: Collection[str] | None = None,
    **_: Any,
) -> None:
    """Lock the objects that a row belongs to before it is written, and those that it belongs to until then."""
    watches = [] if raw else watches_for(sender, instance, using, update_fields)
    if watches:
        owners = owners_by_values(watches, [instance], using)
        moved = [] if instance._state.adding else [each for each in watches if each.may_move(update_fields)]
        owners.update(owners_by_keys(moved, [instance.pk], using))
        owners.lock(using)
        vars(instance._state)["delayq_owners"] = owners


def arm_owners(sender: type[Model], instance: Model, using: str, **_: Any) -> None:
    """Arm, move or cancel the timeouts of the objects that `lock_owners` has found."""
    if owners := vars(instance._state).pop("delayq_owners", None):
        owners.arm(using)


@dataclass(slots=True)
class _Deletion:
    """The objects that rows belong to which are being deleted, and the last of these rows: the deletion keeps it."""

    owners: Owners
    last: ref[Model]


# For each connection and sender. A deletion that failed leaves one behind whose rows are gone, or soon will be.
_deletions: WeakKeyDictionary[Any, dict[type[Model], _Deletion]] = WeakKeyDictionary()


def note_owners(sender: type[Model], instance: Model, using: str, *, origin: Any = None, **_: Any) -> None:
    """Lock the objects that a row belongs to before it is deleted, and note them, so that many rows arm them once.

    With the first row of a queryset lock those of all its rows, in one order.
    """
    watches = watches_for(sender, instance, using)
    if not watches:
        return
    by_sender, found = _deletions.setdefault(connections[using], {}), owners_by_values(watches, [instance], using)
    found.update(owners_by_keys((each for each in watches if each.hops[-1].is_forward), [instance.pk], using))
    present = by_sender.get(sender)
    if present is None or present.last() is None:
        present = by_sender[sender] = _Deletion(Owners(), ref(instance))
        if isinstance(origin, QuerySet) and origin.model is sender:
            found.update(owners_by_keys(watches, origin.using(using).values_list("pk", flat=True), using))
    found.without(present.owners).lock(using)
    present.owners.update(found)
    present.last = ref(instance)


def arm_owners_of_deleted(sender: type[Model], using: str, **_: Any) -> None:
    """Arm, move or cancel the timeouts of all noted objects, with the first row: the statement has deleted all."""
    if noted := _deletions.get(connections[using], {}).pop(sender, None):
        noted.owners.arm(using)


def follow_relation(
    sender: type[Model],
    instance: Model,
    action: str,
    using: str,
    *,
    reverse: bool = False,
    pk_set: Collection[Any] | None = None,
    **_: Any,
) -> None:
    """Lock the objects of a many-to-many relation before its rows are written, and arm them afterwards."""
    if action.startswith("post"):
        arm_owners(sender, instance, using)
        return
    owners, relation = Owners(), _relation_through(sender)
    own_side = relation.m2m_reverse_field_name() if reverse else relation.m2m_field_name()
    for watch in watches_for(sender, instance, using):
        side = watch.hops[-1].field
        if side.name == own_side:
            values: Collection[Any] = [getattr(instance, side.target_field.attname)]
        elif pk_set is not None:
            values = pk_set
        else:  # `clear()`
            rows = rows_of(sender, using).filter(**{own_side: instance})
            values = list(rows.values_list(side.attname, flat=True)[: MOST + 1])
        owners.add(watch, _owners_of(watch, values, using))
    owners.lock(using)
    vars(instance._state)["delayq_owners"] = owners
