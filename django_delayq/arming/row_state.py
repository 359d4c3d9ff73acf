"""Read in one query what `when` and `since` of each policy are for a row now, and what the ledger has for it.

The query for one row is compiled once per model and database: compiling it on each save would cost more than ten
times the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from django.db import connections
from django.db.models import Case, CharField, Exists, F, IntegerField, OuterRef, Q, Subquery, Value, When
from django.db.models.fields import BigIntegerField, BooleanField, DateTimeField
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact, IsNull

from django_delayq.ledger.controls import delay_in_force
from django_delayq.ledger.locking import for_update, has_own_manager, lock_parents, read_committed, rows_of
from django_delayq.ledger.subjects import NEWEST_FIRST, kind_of, slots_of
from django_delayq.models import Timeout
from django_delayq.policy.reads import reads_other_rows, since_name, with_since
from django_delayq.policy.terms import (
    CONSTANT,
    follows_data,
    has_column,
    lacks_none,
    prefix,
    terms_column,
    terms_of_code,
)
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.key_types import HAS_KEY, object_id_of, root_of_key
from django_delayq.sql.now import column_within_calendar
from django_delayq.sql.statements import Param, Statement, compiled, params
from django_delayq.times.clock import in_own_zone, latest_start

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime, timedelta

    from django.db.models import Model, QuerySet

    from django_delayq.policy.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause
# These close the round of their `since` value: it is not armed again. If a skip by the handler or by a guard rail did
# not close it, the round would be armed again, be due immediately, and be skipped again, indefinitely. And a policy
# that leaves shadow mode would fire what it has skipped.
CLOSING = (
    Q(state__in=(State.FIRED, State.DEAD, State.FIRING))
    | Q(state=State.CANCELLED, cause=Cause.HAND)
    | Q(state=State.SKIPPED, cause__in=(Cause.HANDLER, Cause.LATE, Cause.SHADOW))
)
MAX_SINCE = 400
"""More values are compared as a range: with the slots of a page, older SQLite accepts 999 parameters."""


@dataclass(frozen=True, slots=True)
class RowState:
    """What one locked read shows of one object and policy."""

    pk: Any
    policy: TimeoutPolicy[Any]
    holds: bool
    since_at: datetime | None
    """None also for a callable `since`, which `diff` calls, and if it is beyond the supported years."""
    after: timedelta | None
    """The delay that an operator has put in force; None: the declared one."""
    pending_id: int | None = None
    pending_since: datetime | None = None
    closed: bool | None = None
    """Whether the round of `since_at` is closed; None: SQL cannot read or compare the value, or was not asked."""
    on_hold: int | None = None
    """Whether `hold_when` holds; None: it was not asked. The last two are read only if the policy has it."""
    held: int = 0
    """How the pending round is held: see `held_how`."""
    terms: str | None = None
    pending_terms: str | None = None
    """The terms of the row now, if SQL knows them, and of the pending round: see `policy.terms`."""


def row_state(policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str, *, lock: bool) -> list[RowState]:
    """Return the state of the row `pk` for each of its `policies`, or [] if it is gone.

    `lock`: until the transaction ends.
    """
    if lock:
        lock_parents(policies[0].concrete_model, [pk], using)
    rows, states = _read(_row, policies, pk, using, lock), list[RowState]()
    for key, *values in rows:
        left = iter(values)
        states += [RowState(key, policy, **dict(zip(_fields(policy), left, strict=False))) for policy in policies]
    return states


def _own_fields(policy: TimeoutPolicy[Any]) -> tuple[str, ...]:
    """Return the fields of `RowState` for which `_columns` has a column, in their order."""
    more = (("terms", follows_data(policy)), ("on_hold", policy.hold_when is not None))
    return ("holds", "since_at", "after", *(name for name, is_read in more if is_read))


def _fields(policy: TimeoutPolicy[Any]) -> tuple[str, ...]:
    """Return the fields of `RowState` for which the query for one row has a column, in their order."""
    own, of_round = _own_fields(policy), {"terms": "pending_terms", "on_hold": "held"}
    return (*own, "pending_id", "pending_since", "closed", *(of_round[name] for name in own if name in of_round))


def _read(
    build: Callable[..., QuerySet[Any, Any]], policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str, *shape: Any
) -> list[Sequence[Any]]:
    """Execute the query that `build` returns for one row.

    It is compiled each time if a base manager may filter by something else each time, such as a tenant.
    """
    values = {"pk": pk, "slot": list(slots_by_object(policies, [pk], using))}
    if any(has_own_manager(policy.model) for policy in policies):
        return Statement(build(using, tuple(policies), *shape), using).read(values, connections[using])
    return compiled(build).rows(using, tuple(policies), *shape, **values)


def _row(using: str, policies: tuple[TimeoutPolicy[Any], ...], lock: bool) -> QuerySet[Any, Any]:
    """Build the query for one row: the key, then for each policy the columns of `_fields`.

    It joins only the tables of parents, whatever the managers of the model add, so that it can lock.
    """
    text, columns = dialect_of(connections[using]).datetime_text, dict[str, Any]()
    for number, (policy, rounds, pending) in enumerate(_rounds_of(policies, using)):
        closed: Any = Value(None, output_field=IntegerField())
        if since := since_name(policy, number):
            of_since = Q(since_at=OuterRef(since))
            # Beside a pending round of this `since` it does not matter, and there may be very many closed ones.
            is_unknown = Q(has_some(pending.filter(of_since)))
            if text:  # SQLite compares strings, and raw SQL may have written this datetime in another way
                is_unknown |= ~Q((f"{since}__regex", text))
            is_closed = Exists(rounds.filter(CLOSING, of_since))
            closed = Case(When(is_unknown, then=None), default=is_closed, output_field=BooleanField(null=True))
        columns |= _columns(number, policy, using) | {
            f"delayq{number}_pending": Subquery(pending.values("id")[:1], output_field=BigIntegerField()),
            f"delayq{number}_round": Subquery(pending.values("since_at")[:1], output_field=DateTimeField()),
            f"delayq{number}_closed": closed,
        }
        if follows_data(policy):
            columns[f"delayq{number}_with"] = Subquery(pending.values("terms")[:1], output_field=CharField())
        if policy.hold_when is not None:
            held = Subquery(pending.values(held=held_how())[:1], output_field=IntegerField())
            columns[f"delayq{number}_held"] = Coalesce(held, 0)
    rows = _by_key(policies, using).annotate(**columns).values_list("pk", *columns)
    return for_update(rows, using) if lock else rows


def _terms(policy: TimeoutPolicy[Any], using: str) -> Any:
    """Return the terms of the row now as an expression; NULL if SQL does not know them."""
    return terms_column(policy, using) if has_column(policy) else Value(None, output_field=CharField())


def terms_of(
    policy: TimeoutPolicy[Any], rounds: Mapping[Any, tuple[datetime | None, Any]], using: str
) -> dict[Any, str]:
    """Return the terms of deadlines that `policy` computes for locked objects, by key.

    `rounds`: the `since` and the object of each; the object only matters if the policy needs it. One query at most.
    """
    if not policy.is_automatic or not follows_data(policy):  # nothing will ask
        return dict.fromkeys(rounds, CONSTANT)
    if not has_column(policy):
        known = {pk: (since_at, obj) for pk, (since_at, obj) in rounds.items() if since_at is not None}
        found = {pk: terms_of_code(policy, obj, since_at) for pk, (since_at, obj) in known.items()}
    else:
        found = {pk: terms or CONSTANT for pk, (_, terms) in present_data(policy, rounds, using).items()}
    return dict.fromkeys(rounds, CONSTANT) | found


def present_data(
    policy: TimeoutPolicy[Any], pks: Collection[Any], using: str
) -> dict[Any, tuple[datetime | None, str | None]]:
    """Return the `since` and the terms of rows now, by key, in one query; None: SQL does not know them."""
    columns = _since(policy), _terms(policy, using)
    rows = with_since(rows_of(policy.concrete_model, using).filter(pk__in=list(pks)), policy)
    with in_own_zone():
        found = list(read_committed(rows, using).values_list("pk", *columns))
    to_python = root_of_key(policy.concrete_model).to_python
    return {to_python(pk): (since_at, terms) for pk, since_at, terms in found}


def _by_key(policies: Sequence[TimeoutPolicy[Any]], using: str) -> QuerySet[Any, Any]:
    model = policies[0].concrete_model
    return with_since(rows_of(model, using).filter(pk=Param(cast("Any", model._meta.pk), "pk")), *policies)


def ledger_fits(policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str) -> bool:
    """Return whether the ledger has what `policies` require for the row `pk`.

    The database compares, and returns nothing but the key. False also for callables, which SQL cannot read, and with
    `hold_when`, which also concerns rounds with a key.
    """
    for policy in policies:
        is_known = isinstance(policy.since, str) and (has_column(policy) or not follows_data(policy))
        if not is_known or policy.hold_when is not None:
            return False
    return bool(_read(_fitting, policies, pk, using))


def _fitting(using: str, policies: tuple[TimeoutPolicy[Any], ...]) -> QuerySet[Any, Any]:
    rows = _by_key(policies, using)
    for number, (policy, rounds, pending) in enumerate(_rounds_of(policies, using)):
        since = since_name(policy, number)
        of_since = Q(since_at=OuterRef(str(since)))
        is_needed = Q(Exact(condition_value(policy, policy.when, using), 1), (f"{since}__lt", latest_start()))
        unfit = pending.exclude(of_since)
        if has_column(policy):
            rows = rows.alias(**{f"delayq{number}_terms": terms_column(policy, using)})
            unfit = pending.filter(~of_since | data_changed(policy, OuterRef(f"delayq{number}_terms")))
            is_needed &= lacks_none(policy)
        is_there = Case(  # in this order: an object may have very many closed rounds
            When(has_some(unfit), then=Value(False)),
            When(has_some(pending.filter(of_since)), then=Value(True)),
            default=Exists(rounds.filter(CLOSING, of_since)),
            output_field=BooleanField(),
        )
        fits = Case(When(is_needed, then=is_there), default=has_none(pending), output_field=BooleanField())
        rows = rows.filter(fits)
    return rows.values_list("pk")


def data_changed(policy: TimeoutPolicy[Any], terms: Any) -> Q:
    """Return the condition on rounds that data of their computed deadline has changed: see `terms.changed`.

    `terms`: those of their object now.
    """
    return Q(terms__startswith=prefix(policy)) & ~Q(terms=terms)


def held_how() -> Case:
    """Return an expression for a ledger row: 1 if it is held by its condition, plus 2 if by hand; 0: by none."""
    both = When(held_by_hand=True, held_when=True, then=Value(3))
    by_hand, by_condition = When(held_by_hand=True, then=Value(2)), When(state=State.HELD, then=Value(1))
    return Case(both, by_hand, by_condition, default=Value(0), output_field=IntegerField())


def has_none(rows: QuerySet[Any, Any]) -> IsNull:
    """Return the condition that `rows` have none for the row of the surrounding query.

    They are looked up each time, because PostgreSQL cannot join a subquery for one value. Of NOT EXISTS it makes a
    join. Without statistics, as after a restored dump, it then read all rows of a policy for each object: minutes for
    80,000 orders.
    """
    return IsNull(Subquery(rows.values("pk")[:1]), True)


def has_some(rows: QuerySet[Any, Any]) -> IsNull:
    """Return the condition that `rows` have some for the row of the surrounding query: see `has_none`."""
    return IsNull(Subquery(rows.values("pk")[:1]), False)


def _rounds_of(
    policies: Sequence[TimeoutPolicy[Any]], using: str
) -> Iterator[tuple[TimeoutPolicy[Any], QuerySet[Timeout, Any], QuerySet[Timeout, Any]]]:
    """Yield each policy with its rounds for the object of which an execution gives the slots, and the pending ones.

    Inside a transaction that may read stale rows, MySQL reads the current state of the ledger.

    These are in an order that no index has: PostgreSQL expects many pending rows in a slot that has very many rows. For
    EXISTS, or the first row by `id`, it would read the primary key from one end, and find the row at the other end.
    """
    for policy, slot in zip(policies, params("slot", len(policies)), strict=True):
        rounds = read_committed(Timeout.objects.using(using).filter(slot=slot), using)
        yield policy, rounds, rounds.filter(slot_taken=1).order_by(NEWEST_FIRST)


def row_states(policies: Sequence[TimeoutPolicy[Any]], pks: Collection[Any], using: str) -> list[RowState]:
    """Return the states of the rows `pks` for each of their `policies`; whether a round is closed is not asked.

    If the caller has locked the rows: in statements of their own after the one that locked, which see what other
    transactions committed before the lock.
    """
    model, columns = policies[0].concrete_model, dict[str, Any]()
    for number, policy in enumerate(policies):
        columns |= _columns(number, policy, using)
    rows = with_since(rows_of(model, using).filter(pk__in=pks), *policies).annotate(**columns)
    rows = read_committed(rows, using).order_by("pk")
    with in_own_zone():
        found, to_python = list(rows.values_list("pk", *columns)), root_of_key(model).to_python
    pending, states = pending_rounds(policies, pks, using), []
    for key, *values in found:
        pk = to_python(key)
        for policy in policies:
            row_id, since_at, held, terms = pending.get((policy.label, pk), (None, None, 0, None))
            of_round: dict[str, Any] = {"pending_id": row_id, "pending_since": since_at, "held": held}
            of_round["pending_terms"] = terms if follows_data(policy) else None
            states.append(RowState(pk, policy, **{name: values.pop(0) for name in _own_fields(policy)}, **of_round))
    return states


def keyed_rounds(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> list[tuple[Any, int, int]]:
    """Return the key of the object, the id and `held_how` of the waiting rounds of `pks` that have a key."""
    model = policy.concrete_model
    ids = {object_id_of(model, pk): pk for pk in pks}
    rows: Any = Timeout.objects.using(using).filter(
        content_type=kind_of(model, using), object_id__in=list(ids), slot_taken=1
    )
    rows = read_committed(rows.filter(HAS_KEY).of_labels(policy.labels).order_by("slot"), using)
    return [
        (ids[object_id], row_id, held) for object_id, row_id, held in rows.values_list("object_id", "id", held_how())
    ]


def pending_rounds(
    policies: Collection[TimeoutPolicy[Any]], pks: Collection[Any], using: str
) -> dict[tuple[str, Any], tuple[int, datetime | None, int, str | None]]:
    """Return the pending rounds of the objects `pks`, by label and key, in one query.

    Of each, id, `since_at`, `held_how` and `terms`; the last two only if one of the policies needs them.

    Subqueries for each object would take a plan each, and without statistics PostgreSQL reads whole tables for one.
    """
    slots = slots_by_object(policies, pks, using)
    # By slots, because SQLite without statistics would read all rows of the policy to find those of the objects.
    rows = read_committed(Timeout.objects.using(using).filter(slot__in=list(slots), slot_taken=1), using)
    is_read = any(policy.hold_when is not None for policy in policies)
    terms = F("terms") if any(map(follows_data, policies)) else Value(None, output_field=CharField())
    found = rows.values_list("id", "slot", "since_at", held_how() if is_read else Value(0), terms)
    return {slots[slot]: (row_id, since_at, held, terms) for row_id, slot, since_at, held, terms in found}


def slots_by_object(
    policies: Iterable[TimeoutPolicy[Any]], pks: Collection[Any], using: str
) -> dict[str, tuple[str, Any]]:
    """Return the slot of each of these policies and objects, with the policy's label and the key."""
    return {slot: (policy.label, pk) for policy in policies for pk, _, slot in slots_of(policy, pks, "", using)}


def of_since(since: Iterable[datetime | None]) -> Q:
    """Return a condition on rounds that those of the values `since` fulfil, and of very many values a few others."""
    values = sorted({since_at for since_at in since if since_at is not None})
    return Q(since_at__in=values) if len(values) <= MAX_SINCE else Q(since_at__range=(values[0], values[-1]))


def objects_of_policy(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> dict[Any, Any]:
    """Return the objects `pks` as the handler of `policy` would get them, by key. One query, none for no keys."""
    if len(pks) == 1 and not policy.relations and not has_own_manager(policy.model):
        found: Iterable[Any] = _object.objects(using, policy.model, pk=next(iter(pks)))
    else:
        rows = read_committed(policy.model._base_manager.using(using).filter(pk__in=pks), using)
        # Not if the statement locks: it would lock the rows of the relations, too.
        joined = bool(policy.relations) and not rows.query.select_for_update
        found = (rows.select_related(*policy.relations) if joined else rows) if pks else ()
    to_python = root_of_key(policy.concrete_model).to_python
    return {to_python(obj.pk): obj for obj in found}


@compiled
def _object(using: str, model: type[Model]) -> QuerySet[Any, Any]:
    return read_committed(model._base_manager.using(using).filter(pk=Param(cast("Any", model._meta.pk), "pk")), using)


def condition_holds(policy: TimeoutPolicy[Any], pk: Any, using: str) -> bool:
    """Return whether `when` holds on the row `pk` as this transaction sees it; False if the row is gone."""
    return bool(_read(_condition, [policy], pk, using))


def _condition(using: str, policies: tuple[TimeoutPolicy[Any]]) -> QuerySet[Any, Any]:
    model, condition = policies[0].model, policies[0].when or Q()
    rows = model._base_manager.using(using).filter(condition, pk=Param(cast("Any", model._meta.pk), "pk"))
    return read_committed(rows, using).values_list("pk")[:1]


def on_hold_among(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> list[Any]:
    """Return those keys of `pks` for whose rows `hold_when` holds; none if the policy has none."""
    if policy.hold_when is None or not pks:
        return []
    rows = policy.model._base_manager.using(using).filter(policy.hold_when, pk__in=pks)
    with in_own_zone():
        keys, to_python = read_committed(rows, using).values_list("pk", flat=True), root_of_key(policy.model).to_python
        return list(dict.fromkeys(map(to_python, keys)))


def _columns(number: int, policy: TimeoutPolicy[Any], using: str) -> dict[str, Any]:
    """Return the columns of `_own_fields`; `since` is NULL for a callable, and `after` the delay in force."""
    columns = {
        "holds": condition_value(policy, policy.when, using),
        "since": _since(policy, number),
        "after": delay_in_force(policy, using),
    }
    if follows_data(policy):
        columns["terms"] = _terms(policy, using)
    if policy.hold_when is not None:
        columns["on_hold"] = condition_value(policy, policy.hold_when, using)
    return {f"delayq{number}_{name}": column for name, column in columns.items()}


def _since(policy: TimeoutPolicy[Any], number: int = 0) -> Any:
    name = since_name(policy, number)
    return Value(None, output_field=DateTimeField()) if name is None else column_within_calendar(name)


def condition_value(policy: TimeoutPolicy[Any], condition: Q | None, using: str) -> Any:
    """Return a condition of `policy` as 1 or 0; NULL is 0.

    A condition on other rows, or on what the policy's base manager adds, becomes a subquery: PostgreSQL locks
    neither the nullable side of a join nor groups. A row that the base manager hides does not match.
    """
    if has_own_manager(policy.model) or reads_other_rows(policy):
        rows = policy.model._base_manager.using(using).filter(pk=OuterRef("pk"))
        condition = Q(Exists(rows.filter(condition) if condition else rows))
    elif not condition:
        return Value(1, output_field=IntegerField())
    return Case(When(condition, then=Value(1)), default=Value(0), output_field=IntegerField())
