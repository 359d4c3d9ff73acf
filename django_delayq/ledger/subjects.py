"""What a timeout is about: a policy, an object, a key.

The ledger identifies an object by its content type and its primary key as a string, which `key_types` defines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from django.contrib.contenttypes.models import ContentType, ContentTypeManager
from django.db import connections
from django.db.models import CharField, F, Func, Model, OuterRef, Q, QuerySet
from django.db.models.lookups import Exact, In
from django.db.models.sql.where import AND

from django_delayq.ledger.locking import for_update, lock_object, read_committed
from django_delayq.ledger.routing import database_of
from django_delayq.models import SLOT_BYTES, Timeout, TimeoutQuerySet, slot_of
from django_delayq.policy.policies import TimeoutPolicy, registry, resolve_policy
from django_delayq.rounds.memory import clean
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.key_types import key_type, object_id_of, pk_of, refusal, root_of_key
from django_delayq.sql.statements import compiled, param

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.expressions import Combinable
    from django.db.models.sql.compiler import SQLCompiler


MAX_KEY = 200
"""The length of the column: PostgreSQL would refuse a longer one in the middle of a transaction."""
MAX_IDS = 50_000
"""The longest list that `_IsKeyOf` writes. Of more objects it reads the one of each row, by its key."""
NEWEST_FIRST = (F("id") + 0).desc()
"""The order of rows of one slot. By `id` itself, PostgreSQL may search the primary key instead of the slot's index."""


@dataclass(slots=True, eq=False)
class Subject:
    """One policy, object and key in one database; or, with `row_id`, one row of them."""

    policy: TimeoutPolicy[Any] | None
    """None: the policy is not declared any more. Its rows can still be found, cancelled and moved."""
    model: type[Model] | None
    pk: Any
    labels: tuple[str, ...]
    content_type_id: int
    object_id: str
    key: str
    using: str
    slot: str
    """The slot of its rounds: see `slot_of`."""
    row_id: int | None = None

    def rounds(self) -> TimeoutQuerySet:
        """Return all rows of this subject, the pending one first, then newest first.

        A pending row is not the newest one if an operator has retried it after a newer one had settled.
        """
        pending_first = F("slot_taken").desc(nulls_last=True)
        rows: TimeoutQuerySet = Timeout.objects.using(self.using).order_by(pending_first, NEWEST_FIRST)
        return rows.filter(slot=self.slot) if self.row_id is None else rows.filter(pk=self.row_id)

    def pending(self) -> TimeoutQuerySet:
        """Return the pending row, if there is one; it is found by its unique slot."""
        return self.rounds().filter(slot_taken=1)

    @property
    def automatic_policy(self) -> TimeoutPolicy[Any] | None:
        """Return the policy by which saves arm the rounds of this subject; None: none does, or it is only one of them.

        Rounds with a key are scheduled by hand, whatever the policy.
        """
        policy = self.policy if self.row_id is None and not self.key else None
        return policy if policy is not None and policy.is_automatic else None

    @property
    def object_and_key(self) -> str:
        """Return the object's id, and the key if there is one."""
        return f"{self.object_id}{f' ({self.key})' if self.key else ''}"

    def __str__(self) -> str:
        """For errors, which are not translated."""
        return f"{self.labels[0]} of {self.object_and_key}"


def current_round(rounds: Iterable[Timeout]) -> Timeout | None:
    """Return the row that `Subject.rounds` returns first."""
    return max(rounds, key=lambda row: (row.slot_taken or 0, row.pk), default=None)


def subject_of(target: Model, policy: str | TimeoutPolicy[Any] | None, key: str = "") -> Subject:
    """Return the subject of an object and a policy, or of a row of the ledger.

    Raises:
        UnknownPolicy: no such policy for this kind of object.
        ValueError: an object that is not saved, a wrong key, or a policy or key that is not that of the `Timeout`.
        TypeError: neither a model instance nor a `Timeout`, or no policy for an object.
    """
    if isinstance(target, Timeout):
        found = _subject_of_row(target)
        names = {found.policy, *found.labels, *(label.rpartition(".")[2] for label in found.labels)}
        if not (policy is None or policy in names) or key not in ("", found.key):
            named = f"{policy or found.labels[0]}{f' with the key {key!r}' if key else ''}"
            raise ValueError(f"{found} is not a timeout of {named}.")
        return found
    resolved, using, pk = place_of(target, policy)
    return subject_at(resolved, pk, key, using)


def place_of(obj: Model, policy: str | TimeoutPolicy[Any] | None) -> tuple[TimeoutPolicy[Any], str, Any]:
    """Return the policy, the database and the key of an object. Raises what `subject_of` raises."""
    if not isinstance(obj, Model):
        words = f"the class {obj.__name__}" if isinstance(obj, type) else type(obj).__name__
        raise TypeError(f"Expected a model instance or a Timeout, not {words}.")
    if isinstance(obj, Timeout):
        raise TypeError("Expected an object, not a Timeout, which is scheduled. To move it, use reschedule_timeout().")
    if policy is None:
        raise TypeError(f"Which policy of {obj.__class__.__name__}? Name one: the policy, its label or its name.")
    model = obj.__class__  # not its type, for a lazy object such as `request.user`
    resolved = resolve_policy(policy, model)
    pk = resolved.pk_of(obj)
    if pk is None or obj._state.adding:
        raise ValueError(f"{obj!r} is not saved: save it first, its timeouts are kept by its primary key.")
    return resolved, database_of(model, obj), pk


def subject_at(policy: TimeoutPolicy[Any], pk: Any, key: str, using: str) -> Subject:
    """Return the subject of the object with the primary key `pk`. Raises what `check_key` raises."""
    check_key(key)
    object_id = object_id_of(policy.concrete_model, pk)
    pk = pk_of(policy.concrete_model, object_id)  # of the key's own type, also for an object made with a string
    content_type_id = kind_of(policy.concrete_model, using)
    slot = slot_of(policy.oldest_label, content_type_id, object_id, key)
    return Subject(policy, policy.model, pk, policy.labels, content_type_id, object_id, key, using, slot)


def check_key(key: str) -> None:
    """Raise ValueError unless `key` is a string of at most 200 characters that every database stores.

    PostgreSQL refuses NUL, and drivers lone surrogates. Both would end the caller's transaction.
    """
    rule = f"key must be a string of at most {MAX_KEY} characters without NUL and lone surrogates"
    if not isinstance(key, str):  # not its repr, which of a queryset would query the database
        raise ValueError(f"{rule}, not of type {type(key).__name__}.")
    if len(key) > MAX_KEY or clean(key) != key:
        raise ValueError(f"{rule}, not {key!r}.")


def slots_of(policy: TimeoutPolicy[Any], pks: Iterable[Any], key: str, using: str) -> Iterator[tuple[Any, str, str]]:
    """Yield each of `pks`, in the key's own type, with its text and its slot.

    As `subject_at` does for one object, which takes ten times as long.
    """
    table = policy.concrete_model
    to_python, text = root_of_key(table).to_python, key_type(table).text
    common = blake2b(f"{policy.oldest_label}\0{kind_of(table, using)}\0".encode(), digest_size=SLOT_BYTES)
    for pk in map(to_python, pks):
        object_id, digest = text(pk), common.copy()
        digest.update("\0".join((object_id, key)).encode())
        yield pk, object_id, digest.hexdigest()


def renew_slot(sender: type[Timeout], instance: Timeout, *, raw: bool = False, **_: Any) -> None:
    """Compute the slot of a timeout that `loaddata` writes: its content type may have another id in this database.

    Not of an erased one, whose key is no longer known.
    """
    if raw and instance.erased_at is None:
        policy = registry.get(instance.policy)
        label = policy.oldest_label if policy else instance.policy
        instance.slot = slot_of(label, instance.content_type_id, instance.object_id, instance.key)


def _subject_of_row(row: Timeout) -> Subject:
    if row.pk is None:
        raise ValueError("This Timeout is not a row of the ledger.")
    policy = registry.get(row.policy)
    using = database_of(Timeout, row)
    model, pk = model_and_pk_of(row, using)
    labels = (row.policy,) if policy is None else (row.policy, *(x for x in policy.labels if x != row.policy))
    return Subject(policy, model, pk, labels, row.content_type_id, row.object_id, row.key, using, row.slot, row.pk)


def instances(target: Any) -> list[Model]:
    """Return the model instances that `target` is, or that it contains. Raises TypeError for anything else."""
    if isinstance(target, type):
        raise TypeError(f"Expected model instances or a queryset, not a class. Pass {target.__name__}.objects.all().")
    is_several = isinstance(target, Iterable) and not isinstance(target, Model | str)
    found = list(target) if is_several else [target]
    for obj in found:
        if not isinstance(obj, Model):
            raise TypeError(f"Expected model instances or a queryset of them, not {obj!r}.")
    return found


def model_and_pk_of(row: Timeout, using: str) -> tuple[type[Model] | None, Any]:
    """Return the model and the key of the object; (None, None) if the row names no model or not a key of it."""
    policy = registry.get(row.policy)
    model = policy.model if policy else model_of_kind(row.content_type_id, using)
    try:
        return model, None if model is None else pk_of(model, row.object_id)
    except ValueError:
        return None, None


def objects_of(rows: Iterable[Timeout], using: str) -> Iterator[tuple[type[Model], list[Any]]]:
    """Yield models and sorted keys of the objects of `rows`, in the order in which all callers lock them.

    Policies may be declared for several models with one key: proxies, a parent and its multi-table children. Their
    topmost table comes first, with the keys of all, so that its rows are locked in one order, and then each other one
    with its own. Reads `policy`, `content_type_id` and `object_id` of each row, and no other column.
    """
    roots: dict[type[Model], dict[type[Model], set[Any]]] = {}
    for row in rows:
        model, pk = model_and_pk_of(row, using)
        if model is not None and pk is not None:
            roots.setdefault(root_of(model), {}).setdefault(model, set()).add(pk)
    for root, keys in sorted(roots.items(), key=lambda each: kind_of(each[0], using)):
        if len(keys) > 1:
            yield root, sorted(set().union(*keys.values()))
        yield from ((model, sorted(pks)) for model, pks in keys.items() if len(keys) == 1 or model is not root)


@functools.cache
def root_of(model: type[Model]) -> type[Model]:
    """Return the topmost table that has the key of `model`: its own, or that of a parent. It is locked first."""
    return [table for table in tables_of(model) if root_of_key(table) is root_of_key(model)][-1]


@functools.cache
def _kinds(using: str) -> ContentTypeManager:
    """Return the manager of the content types of a database; all share one cache, which Django clears."""
    return ContentType.objects.db_manager(using)


def kind_of(table: type[Model], using: str) -> int:
    """Return the id of the content type under which the ledger has objects of `table`."""
    return int(_kinds(using).get_for_model(table).pk)


def model_of_kind(content_type_id: int, using: str) -> type[Model] | None:
    """Return the model of a content type; None if the model, or the content type itself, does not exist any more."""
    try:
        return _kinds(using).get_for_id(content_type_id).model_class()
    except ContentType.DoesNotExist:
        return None


def tables_of(model: type[Model]) -> list[type[Model]]:
    """Return the models whose timeouts concern objects of `model`: its own table's, and those of its parents.

    Each has its own key in the ledger: the key of a multi-table child may differ from its parent's.
    """
    own = cast("type[Model]", model._meta.concrete_model)
    return [own, *(parent for parent in own._meta.all_parents if not parent._meta.proxy and not refusal(parent))]


def object_id(reference: Any, model: type[Model], using: str) -> Combinable:
    """Return `reference`, the primary key of `model` in the surrounding query, as `Timeout.object_id` has it.

    Raises:
        PolicyError: the type of the key is not supported.
    """
    return _InLedgerCollation(key_type(model).sql(reference, root_of_key(model), connections[using]))


def key_of(reference: Any, model: type[Model], using: str) -> Combinable:
    """Return the primary key of `model` for `reference`, an `object_id`; NULL if that is not a key.

    Of the key's own type, so that its index finds it. Several ids may have one key: compare `object_id`, too.
    """
    return cast("Combinable", key_type(model).key(reference, root_of_key(model), connections[using]))


def about_objects(tables: Iterable[type[Model]], objects: QuerySet[Any] | Iterable[Model], using: str) -> Q:
    """Return the condition on ledger rows that are about any of `objects`, as objects of `tables`.

    No objects means no rows.
    """
    wanted = Q(pk__in=[])
    for table in tables:
        key: Any = table._meta.pk
        if isinstance(objects, QuerySet) and not order_matters(objects):
            rows = objects.using(using).order_by().annotate(delayq_id=object_id(F(key.name), table, using))
            about_one: Any = _IsKeyOf(F("object_id"), rows.values_list("delayq_id", flat=True))
            about_one.is_own_key = root_of_key(table) is root_of_key(objects.model)
        else:  # MySQL refuses a slice as a subquery, and Django an annotation of a union
            if isinstance(objects, QuerySet):
                keys: Any = objects.using(using).values_list(key.name, flat=True)
            else:
                keys = [getattr(obj, key.attname) for obj in objects]
            about_one = ("object_id__in", [object_id_of(table, each) for each in keys if each is not None])
        wanted |= Q(about_one, content_type=kind_of(table, using))
    return wanted


def about_model(tables: Sequence[type[Model]], model: type[Model], using: str) -> Q:
    """Return the condition on ledger rows of `tables` that are about any object of `model`.

    Of its own table all rows, also those about objects that are gone; of its parents only those about its objects.
    """
    own: Any = model._meta.concrete_model
    parents = [table for table in tables if table is not own]
    wanted = about_objects(parents, model._base_manager.using(using).all(), using)
    return wanted | Q(content_type=kind_of(model, using)) if own in tables else wanted


def order_matters(rows: QuerySet[Any]) -> bool:
    """Return whether without its order `rows` would be other rows (a slice, DISTINCT ON), or an error (a union)."""
    query = rows.query
    return bool(query.is_sliced or query.distinct_fields or query.combinator)


def about_outer_row(model: type[Model], using: str) -> Q:
    """Return the condition on ledger rows that are about the row of a surrounding query over `model`."""
    wanted = Q(pk__in=[])
    for table in tables_of(model):
        own_id = object_id(OuterRef(cast("Any", table._meta.pk).name), table, using)
        wanted |= Q(content_type=kind_of(table, using), object_id=own_id)
    return wanted


class _IsKeyOf(In):
    """The condition that `object_id` is in a subquery, on PostgreSQL written as the list of its results if it is short.

    Without statistics, as after a restored dump, PostgreSQL expects one row of the ledger, and therefore evaluates the
    subquery again for each one: minutes for 100 of 40,000 orders. The list is read each time the query is compiled, so
    that a queryset stays lazy.
    """

    def __init__(self, lhs: Any, rhs: Any) -> None:
        super().__init__(lhs, rhs)
        self.ids = rhs
        """The subquery as a queryset; `rhs` becomes a part of the surrounding query."""
        self.is_own_key = False
        """Whether the results are keys of its model, and not those that its objects have in the table of a parent."""

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        """Compile the list or the subquery."""
        if (
            dialect_of(connection).needs_statistics
            and self.ids.db == connection.alias
            and not self._is_correlated(connection)
        ):
            ids = list(self.ids[: MAX_IDS + 1])
            if len(ids) <= MAX_IDS:
                lhs, params = self.process_lhs(compiler, connection)
                return f"{lhs} = ANY(%s::varchar[])", (*params, ids)  # one parameter, because many take longer
            if (by_key := self._by_key(connection)) is not None:
                sql, found = by_key.get_compiler(connection=connection).as_sql()
                return f"EXISTS({sql})", tuple(found)
        return super().as_sql(compiler, connection)

    def _by_key(self, connection: BaseDatabaseWrapper) -> Any:
        """Return the subquery for one row of the ledger, which reads the object by its key; None: SQL has no key.

        For a page of rows of the ledger, each is one lookup in the index of the objects, whatever the planner guesses.
        """
        query: Any = self.ids.query.clone()
        key = key_of(self.lhs, query.model, connection.alias) if self.is_own_key else None
        if key is None or query.distinct or query.group_by is not None:
            return None
        query.where.add(Exact(query.model._meta.pk.get_col(query.get_initial_alias()), key), AND)
        return query

    def _is_correlated(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether the subquery refers to a query around it, by an `OuterRef`, so that it has no list."""
        try:
            _, params = self.ids.query.get_compiler(connection=connection).as_sql()
        except ValueError:
            return True
        return any(hasattr(each, "resolve_expression") for each in params)


class _InLedgerCollation(Func):
    """A string that can be compared with `Timeout.object_id`."""

    output_field = CharField()
    template = "%(expressions)s"

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *args: Any, **context: Any
    ) -> tuple[str, Any]:
        """Compile the string, in the collation of the column."""
        sql, params = super().as_sql(compiler, connection, *args, **context)
        table = Timeout._meta.db_table
        return dialect_of(connection).in_collation_of(sql, connection, table, "object_id"), params


def lock_subject(subject: Subject) -> Model | None:
    """Lock the object of `subject` and return it; None: its model is gone, or the object does not exist any more."""
    return None if subject.model is None else lock_object(subject.model, subject.pk, subject.using)


def lock_newest(subject: Subject, *, pending: bool = False) -> Timeout | None:
    """Wait for the newest row of `subject`, or for the pending one, and lock it; return None if there is none.

    Rows that were superseded do not count if there is another: `since` came back to the value of an older round.

    A database that locks what it reads may read a small table backwards by the primary key, and deadlock. Asked for
    the ids alone, it reads them from the index of slots.
    """
    using, slot, row_id = subject.using, subject.slot, subject.row_id
    if row_id is None and dialect_of(connections[using]).locks_what_it_reads:
        ids = _rounds.rows(using, False, pending, True, slot=slot)
        if not ids:
            return None
        row_id = max(row[0] for row in ids)
    found = _rounds.objects(using, row_id is not None, pending, False, slot=slot, id=row_id)
    if found and found[0].cause == Timeout.Cause.SUPERSEDED:
        for other in read_committed(subject.rounds().exclude(cause=found[0].cause), using)[:1]:
            return lock_newest(replace(subject, row_id=other.pk))
    return found[0] if found else None


@compiled
def _rounds(using: str, by_id: bool, pending: bool, only_ids: bool) -> QuerySet[Any, Any]:
    rows: QuerySet[Any, Any] = Timeout.objects.using(using)
    rows = rows.filter(pk=param("id")) if by_id else rows.filter(slot=param("slot"))
    rows = for_update(rows.filter(slot_taken=1) if pending else rows, using)
    return rows.values_list("pk") if only_ids else rows.order_by("-id")[:1]
