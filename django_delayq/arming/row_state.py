"""Read in one query what `when` and `since` of each policy are for a row now, and what the ledger has for it.

The query for one row is compiled once per model and database: compiling it on each save would cost more than ten
times the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from django.db import connections
from django.db.models import Case, Exists, F, IntegerField, OuterRef, Q, Subquery, Value, When
from django.db.models.fields import BigIntegerField, BooleanField, DateTimeField
from django.db.models.lookups import Exact, IsNull

from django_delayq.dialects import dialect_of
from django_delayq.key_types import object_id_of, root_of_key
from django_delayq.ledger.controls import delay_in_force
from django_delayq.ledger.locking import as_it_is, for_update, has_own_manager, lock_parents, rows_of
from django_delayq.ledger.statements import Param, compiled, params
from django_delayq.ledger.subjects import NEWEST_FIRST, kind_of, slots_of
from django_delayq.models import Timeout, slot_of
from django_delayq.policy_rules import reads_other_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from datetime import datetime, timedelta

    from django.db.models import Model, QuerySet

    from django_delayq.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause
# These close the round of their `since` value: it is not armed again. If a skip by the handler or by a guard rail did
# not close it, the round would be armed again, be due immediately, and be skipped again, indefinitely. And a policy
# that leaves shadow mode would fire what it has skipped.
CLOSING = (
    Q(state__in=(State.FIRED, State.DEAD, State.FIRING))
    | Q(state=State.CANCELLED, cause=Cause.HAND)
    | Q(state=State.SKIPPED, cause__in=(Cause.HANDLER, Cause.LATE, Cause.SHADOW))
)
COLUMNS = 6
MAX_SINCE = 400
"""More values are compared as a range: with the slots of a page, older SQLite accepts 999 parameters."""


@dataclass(frozen=True, slots=True)
class RowState:
    """What one locked read shows of one object and policy."""

    pk: Any
    policy: TimeoutPolicy[Any]
    holds: bool
    since_at: datetime | None
    after: timedelta | None
    """The delay that an operator has put in force; None: the declared one."""
    pending_id: int | None
    pending_since: datetime | None
    closed: bool | None
    """Whether the round of `since_at` is closed; None: SQL cannot read or compare the value, or was not asked."""


def row_state(
    model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str, *, lock: bool
) -> list[RowState]:
    """Return the state of the row `pk` for each policy, or [] if it is gone. `lock`: until the transaction ends."""
    if lock:
        lock_parents(model, [pk], using)
    slots = _slots_of(model, policies, pk, using)
    rows = _row.rows(using, model, tuple(policies), lock, pk=pk, slot=slots)
    return [
        RowState(pk, policy, *values[COLUMNS * number : COLUMNS * (number + 1)])
        for pk, *values in rows
        for number, policy in enumerate(policies)
    ]


@compiled
def _row(using: str, model: type[Model], policies: tuple[TimeoutPolicy[Any], ...], lock: bool) -> QuerySet[Any, Any]:
    rows = _query(model, policies, using)
    return for_update(rows, using) if lock else rows


def ledger_fits(model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str) -> bool:
    """Return whether the ledger has what `policies` require for the row `pk`.

    The database compares, and returns nothing but the key. False also for a callable `since`, which SQL cannot read.
    """
    if not all(isinstance(policy.since, str) for policy in policies):
        return False
    slots = _slots_of(model, policies, pk, using)
    return bool(_fitting.rows(using, model, tuple(policies), pk=pk, slot=slots))


@compiled
def _fitting(using: str, model: type[Model], policies: tuple[TimeoutPolicy[Any], ...]) -> QuerySet[Any, Any]:
    rows = rows_of(model, using).filter(pk=Param(cast("Any", model._meta.pk), "pk"))
    for policy, rounds in zip(policies, _rounds_of(policies, using), strict=True):
        pending, of_since = rounds.filter(slot_taken=1), Q(since_at=OuterRef(str(policy.since)))
        is_needed = Q(Exact(_holds(policy, using), 1), (f"{policy.since}__isnull", False))
        is_there = Case(  # in this order: an object may have very many closed rounds
            When(_has_none(pending.exclude(of_since), False), then=Value(False)),
            When(_has_none(pending.filter(of_since), False), then=Value(True)),
            default=Exists(rounds.filter(CLOSING, of_since)),
            output_field=BooleanField(),
        )
        default = _has_none(pending)
        rows = rows.filter(Case(When(is_needed, then=is_there), default=default, output_field=BooleanField()))
    return rows.values_list("pk")


def _has_none(pending: QuerySet[Timeout, Any], expected: bool = True) -> IsNull:
    """Return the condition that there are no such rows in a slot; with `expected=False`, that there are some.

    PostgreSQL expects many pending rows in a slot that has very many rows, and would read tables or the primary key
    from one end for EXISTS or the first row by `id`, and find the one pending row at the other end.
    """
    return IsNull(Subquery(pending.order_by(NEWEST_FIRST).values("pk")[:1]), expected)


def _slots_of(model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str) -> list[str]:
    object_id, kind = object_id_of(model, pk), kind_of(model, using)
    return [slot_of(label, kind, object_id, "") for policy in policies for label in policy.labels]


def _rounds_of(policies: Sequence[TimeoutPolicy[Any]], using: str) -> Iterator[QuerySet[Timeout, Any]]:
    """Yield the rounds of each policy for the object of which an execution gives the slots, by `_slots_of`.

    Inside a transaction that may read stale rows, MySQL reads the current state of the ledger.
    """
    slots = iter(params("slot", sum(len(policy.labels) for policy in policies)))
    for policy in policies:
        rows = Timeout.objects.using(using).filter(slot__in=list(islice(slots, len(policy.labels))))
        yield as_it_is(rows, using)


def row_states(
    model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pks: Collection[Any], using: str
) -> list[RowState]:
    """Return the states of the rows `pks`; of a callable `since`, what the objects say now.

    If the caller has locked the rows: in statements of their own after the one that locked, which see what other
    transactions committed before the lock.
    """
    shown: dict[str, Any] = {}
    for number, policy in enumerate(policies):
        shown |= _columns(number, policy, using)
    found = as_it_is(rows_of(model, using).filter(pk__in=pks).annotate(**shown), using).order_by("pk")
    to_python = root_of_key(model).to_python
    rows = [(to_python(pk), *rest) for pk, *rest in found.values_list("pk", *shown)]
    found_by_policy = []
    for number, policy in enumerate(policies):
        read = [(row[0], *row[1 + 3 * number : 4 + 3 * number]) for row in rows]
        if callable(policy.since):
            objects = objects_of_policy(policy, [pk for pk, holds, *_ in read if holds], using)
            since_of = {pk: policy.since_of(obj) for pk, obj in objects.items()}
            read = [(pk, holds, since_of.get(pk), after) for pk, holds, _, after in read]
        found_by_policy.append((policy, read))
    rounds = Rounds(policies, pks, using, [since_at for _, read in found_by_policy for *_, since_at, _ in read])
    return [
        rounds.state(policy, pk, holds=holds, since_at=since_at, after=after)
        for policy, read in found_by_policy
        for pk, holds, since_at, after in read
    ]


def of_since(since: Iterable[datetime | None]) -> Q:
    """Return a condition on rounds that those of the values `since` fulfil, and of very many values a few others."""
    values = sorted({since_at for since_at in since if since_at is not None})
    return Q(since_at__in=values) if len(values) <= MAX_SINCE else Q(since_at__range=(values[0], values[-1]))


class Rounds:
    """The pending rounds of some objects, and the closed ones with one of the values `since`, read in one query.

    Subqueries for each object would take a plan each, and without statistics PostgreSQL reads whole tables for one.
    """

    def __init__(
        self,
        policies: Sequence[TimeoutPolicy[Any]],
        pks: Collection[Any],
        using: str,
        since: Iterable[datetime | None],
    ) -> None:
        places: dict[str, tuple[str, Any]] = {}
        for policy in policies:
            for label in policy.labels:
                for pk, _, slot in slots_of(policy, label, pks, "", using):
                    places[slot] = (policy.label, pk)
        # By slots, because SQLite without statistics would read all rows of the policy to find those of the objects.
        rows = Timeout.objects.using(using).filter(Q(slot_taken=1) | CLOSING & of_since(since), slot__in=list(places))
        self._pending: dict[tuple[str, Any], tuple[int, datetime | None]] = {}
        self._closed: set[tuple[str, Any, datetime | None]] = set()
        for slot, since_at, row_id, taken in as_it_is(rows, using).values_list("slot", "since_at", "id", "slot_taken"):
            place = places[slot]
            if not taken:
                self._closed.add((*place, since_at))
            elif place not in self._pending or row_id > self._pending[place][0]:
                self._pending[place] = (row_id, since_at)

    def state(
        self, policy: TimeoutPolicy[Any], pk: Any, *, holds: bool, since_at: datetime | None, after: timedelta | None
    ) -> RowState:
        """Return the state of the object `pk`, of which `when` and `since` are known."""
        place = (policy.label, pk)
        pending_id, pending_since = self._pending.get(place, (None, None))
        is_closed = (*place, since_at) in self._closed
        return RowState(pk, policy, holds, since_at, after, pending_id, pending_since, is_closed)


def objects_of_policy(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> dict[Any, Any]:
    """Return the objects `pks` as the handler of `policy` would get them, by key. One query, none for no keys."""
    if len(pks) == 1 and not has_own_manager(policy.model):
        found: Iterable[Any] = _object.objects(using, policy.model, pk=next(iter(pks)))
    else:
        found = as_it_is(policy.model._base_manager.using(using).filter(pk__in=pks), using) if pks else ()
    to_python = root_of_key(policy.concrete_model).to_python
    return {to_python(obj.pk): obj for obj in found}


@compiled
def _object(using: str, model: type[Model]) -> QuerySet[Any, Any]:
    return as_it_is(model._base_manager.using(using).filter(pk=Param(cast("Any", model._meta.pk), "pk")), using)


def condition_holds(policy: TimeoutPolicy[Any], pk: Any, using: str) -> bool:
    """Return whether `when` holds on the row `pk` as this transaction sees it; False if the row is gone."""
    if has_own_manager(policy.model):  # it may filter by something else each time, such as a tenant
        return bool(_matching(using, policy, pk))
    return bool(_condition.rows(using, policy, pk=pk))


@compiled
def _condition(using: str, policy: TimeoutPolicy[Any]) -> QuerySet[Any, Any]:
    return _matching(using, policy, Param(cast("Any", policy.model._meta.pk), "pk"))


def _matching(using: str, policy: TimeoutPolicy[Any], pk: Any) -> QuerySet[Any, Any]:
    rows = policy.model._base_manager.using(using).filter(policy.when or Q(), pk=pk)
    return as_it_is(rows, using).values_list("pk")[:1]


def _query(model: type[Model], policies: Sequence[TimeoutPolicy[Any]], using: str) -> QuerySet[Any, Any]:
    """Return a query for one row of `model`: the key, then `COLUMNS` per policy, in the order of `RowState`.

    It joins only the tables of parents, whatever the managers of `model` add, so that it can lock.
    """
    columns: dict[str, Any] = {}
    for number, (policy, rounds) in enumerate(zip(policies, _rounds_of(policies, using), strict=True)):
        pending = rounds.filter(slot_taken=1).order_by(NEWEST_FIRST)
        closed: Any = Value(None, output_field=IntegerField())
        columns |= _columns(number, policy, using)
        columns[f"delayq{number}_pending"] = Subquery(pending.values("id")[:1], output_field=BigIntegerField())
        columns[f"delayq{number}_round"] = Subquery(pending.values("since_at")[:1], output_field=DateTimeField())
        if isinstance(policy.since, str):
            # Beside a pending round of this `since` it does not matter, and there may be very many closed ones.
            is_pending = When(_has_none(pending.filter(since_at=OuterRef(policy.since)), False), then=Value(None))
            closed = _is_closed(policy.since, rounds, using)
            closed = Case(is_pending, default=closed, output_field=BooleanField(null=True))
        columns[f"delayq{number}_closed"] = closed
    rows = rows_of(model, using).filter(pk=Param(cast("Any", model._meta.pk), "pk"))
    return cast("QuerySet[Any, Any]", rows.annotate(**columns).values_list("pk", *columns))


def _is_closed(since: str, rounds: QuerySet[Timeout, Any], using: str) -> Any:
    """Return whether one of `rounds` closes that of the column `since`.

    NULL where datetimes are compared as strings, and the string is not Django's: the same value may be written in
    several ways, for example with three digits for milliseconds by strftime('%f') of SQLite.
    """
    closed = Exists(rounds.filter(CLOSING, since_at=OuterRef(since)))
    text = dialect_of(connections[using]).datetime_text
    if not text:
        return closed
    return Case(When(Q((f"{since}__regex", text)), then=closed), default=None, output_field=BooleanField())


def _columns(number: int, policy: TimeoutPolicy[Any], using: str) -> dict[str, Any]:
    """Return the columns of `when`, of `since` (NULL for a callable) and of the delay in force."""
    since = F(policy.since) if isinstance(policy.since, str) else Value(None, output_field=DateTimeField())
    columns = {"holds": _holds(policy, using), "since": since, "after": delay_in_force(policy, using)}
    return {f"delayq{number}_{name}": column for name, column in columns.items()}


def _holds(policy: TimeoutPolicy[Any], using: str) -> Any:
    """Return `when` as 1 or 0; NULL is 0.

    A condition on other rows, or on what the policy's base manager adds, becomes a subquery: PostgreSQL locks
    neither the nullable side of a join nor groups. A row that the base manager hides does not match.
    """
    when = policy.when
    if has_own_manager(policy.model) or reads_other_rows(policy):
        rows = policy.model._base_manager.using(using).filter(pk=OuterRef("pk"))
        when = Q(Exists(rows.filter(when) if when else rows))
    elif not when:
        return Value(1, output_field=IntegerField())
    return Case(When(when, then=Value(1)), default=Value(0), output_field=IntegerField())
