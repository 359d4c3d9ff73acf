"""Read in one query what `when` and `since` of each policy are for a row now, and what the ledger has for it.

The query for one row is compiled once per model and database: compiling it on each save would cost more than ten
times the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from django.db.models import Case, Exists, F, IntegerField, OuterRef, Q, Subquery, Value, When
from django.db.models.fields import BigIntegerField, DateTimeField

from django_delayq.key_types import key_type, root_of_key
from django_delayq.ledger.controls import delay_in_force, read_delay
from django_delayq.ledger.locking import as_it_is, for_update, has_own_manager, lock_parents, rows_of
from django_delayq.ledger.statements import Param, compiled
from django_delayq.ledger.subjects import kind_of, object_id
from django_delayq.models import Timeout
from django_delayq.policies import registry
from django_delayq.policy_rules import reads_other_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime, timedelta

    from django.db.models import Model, QuerySet

    from django_delayq.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause
# These close the round of their `since` value: it is not armed again. If a skip by the handler did not close it, the
# round would be armed again, be due immediately, and be skipped again, indefinitely.
CLOSING = (
    Q(state__in=(State.FIRED, State.DEAD, State.FIRING))
    | Q(state=State.CANCELLED, cause=Cause.HAND)
    | Q(state=State.SKIPPED, cause=Cause.HANDLER)
)
COLUMNS = 6


@dataclass(frozen=True, slots=True)
class RowState:
    """What one locked read shows of one object and policy."""

    pk: Any
    policy: TimeoutPolicy[Any]
    holds: bool
    since_at: datetime | None
    pending_id: int | None
    pending_since: datetime | None
    closed: bool | None
    """Whether the round of `since_at` is closed; None: unknown, because SQL cannot read a callable `since`."""
    after: timedelta | None = None
    """The delay that an operator has put in force; None: the declared one."""


def row_state(
    model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str, *, lock: bool
) -> list[RowState]:
    """Return the state of the row `pk` for each policy, or [] if it is gone. `lock`: until the transaction ends."""
    if lock:
        lock_parents(model, [pk], using)
    # The id of the content type is part of the shape, because tests create content types again.
    rows = _row.rows(using, model, tuple(policies), kind_of(model, using), lock, registry.version, pk=pk)
    return _row_states(rows[0], policies) if rows else []


@compiled
def _row(
    using: str, model: type[Model], policies: tuple[TimeoutPolicy[Any], ...], kind: int, lock: bool, _version: int
) -> QuerySet[Any, Any]:
    rows = _query(model, policies, kind, using).filter(pk=Param(cast("Any", model._meta.pk), "pk"))
    return for_update(rows, using) if lock else rows


def row_states(
    model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pks: Collection[Any], using: str
) -> list[RowState]:
    """Return the states of the rows `pks`; of a callable `since`, what the objects say now.

    If the caller has locked the rows: in statements of their own after the one that locked, which see what other
    transactions committed before the lock.
    """
    shown: dict[str, Any] = {}
    for number, policy in enumerate(policies):
        shown[f"delayq{number}_holds"] = _holds(policy, using)
        shown[f"delayq{number}_since"] = (
            F(policy.since) if isinstance(policy.since, str) else Value(None, output_field=DateTimeField())
        )
    found = as_it_is(rows_of(model, using).filter(pk__in=pks).annotate(**shown), using).order_by("pk")
    to_python = root_of_key(model).to_python
    rows = [(to_python(pk), *rest) for pk, *rest in found.values_list("pk", *shown)]
    rounds, states = Rounds(model, policies, pks, using), []
    for number, policy in enumerate(policies):
        after = None if policy.after is None else read_delay(policy, using)
        holding = [row[0] for row in rows if row[1 + 2 * number]] if callable(policy.since) else []
        objects = objects_of_policy(policy, holding, using)
        for row in rows:
            holds, since_at = bool(row[1 + 2 * number]), row[2 + 2 * number]
            if callable(policy.since):
                since_at = policy.since_of(objects[row[0]]) if row[0] in objects else None
            states.append(rounds.state(policy, row[0], holds=holds, since_at=since_at, after=after))
    return states


class Rounds:
    """The pending and the closed rounds of some objects, read in one query.

    Subqueries for each object would take a plan each, and without statistics PostgreSQL reads whole tables for one.
    """

    def __init__(
        self, model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pks: Iterable[Any], using: str
    ) -> None:
        self._label = {label: policy.label for policy in policies for label in policy.labels}
        self._field, self._text = root_of_key(model), key_type(model).text
        ids = [self._text(self._field, pk) for pk in map(self._field.to_python, pks)]
        rows = Timeout.objects.using(using).filter(
            CLOSING | Q(slot_taken=1), content_type=kind_of(model, using), object_id__in=ids, policy__in=self._label
        )
        self._pending: dict[tuple[str, str], tuple[int, datetime | None]] = {}
        self._closed: set[tuple[str, str, datetime | None]] = set()
        columns = ("policy", "object_id", "since_at", "id", "slot_taken")
        for label, text, since_at, row_id, taken in as_it_is(rows.filter(key=""), using).values_list(*columns):
            place = (self._label[label], text)
            if not taken:
                self._closed.add((*place, since_at))
            elif place not in self._pending or row_id > self._pending[place][0]:
                self._pending[place] = (row_id, since_at)

    def state(
        self, policy: TimeoutPolicy[Any], pk: Any, *, holds: bool, since_at: datetime | None, after: timedelta | None
    ) -> RowState:
        """Return the state of the object `pk`, of which `when` and `since` are known."""
        place = (policy.label, self._text(self._field, pk))
        pending_id, pending_since = self._pending.get(place, (None, None))
        is_closed = (*place, since_at) in self._closed
        return RowState(pk, policy, holds, since_at, pending_id, pending_since, is_closed, after)


def objects_of_policy(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> dict[Any, Any]:
    """Return the objects `pks` as the handler of `policy` would get them, by key. One query, none for no keys."""
    rows = policy.model._base_manager.using(using).filter(pk__in=pks)
    to_python = root_of_key(policy.concrete_model).to_python
    return {to_python(obj.pk): obj for obj in as_it_is(rows, using)} if pks else {}


def condition_holds(policy: TimeoutPolicy[Any], pk: Any, using: str) -> bool:
    """Return whether `when` holds on the row `pk` as this transaction sees it; False if the row is gone."""
    if has_own_manager(policy.model):  # it may filter by something else each time, such as a tenant
        return bool(_matching(using, policy, pk))
    return bool(_condition.rows(using, policy, registry.version, pk=pk))


@compiled
def _condition(using: str, policy: TimeoutPolicy[Any], _version: int) -> QuerySet[Any, Any]:
    return _matching(using, policy, Param(cast("Any", policy.model._meta.pk), "pk"))


def _matching(using: str, policy: TimeoutPolicy[Any], pk: Any) -> QuerySet[Any, Any]:
    rows = policy.model._base_manager.using(using).filter(policy.when or Q(), pk=pk)
    return as_it_is(rows, using).values_list("pk")[:1]


def _row_states(row: Sequence[Any], policies: Sequence[TimeoutPolicy[Any]]) -> list[RowState]:
    states = []
    for number, policy in enumerate(policies):
        holds, *rest = row[1 + COLUMNS * number : 1 + COLUMNS * (number + 1)]
        states.append(RowState(row[0], policy, bool(holds), *rest))
    return states


def _query(model: type[Model], policies: Sequence[TimeoutPolicy[Any]], kind: int, using: str) -> QuerySet[Any, Any]:
    """Return a query over the table of `model`: the key, then `COLUMNS` per policy, in the order of `RowState`.

    It joins only the tables of parents, whatever the managers of `model` add, so that it can lock. Inside a
    transaction that may read stale rows, MySQL reads the current state of the ledger.
    """
    key = model._meta.pk
    assert key is not None
    own_id = object_id(OuterRef(key.name), model, using)
    columns: dict[str, Any] = {}
    for number, policy in enumerate(policies):
        since = F(policy.since) if isinstance(policy.since, str) else None
        rows = as_it_is(Timeout.objects.using(using), using).filter(
            content_type=kind, object_id=own_id, policy__in=policy.labels, key=""
        )
        pending = rows.filter(slot_taken=1).order_by("-id")
        columns[f"delayq{number}_holds"] = _holds(policy, using)
        columns[f"delayq{number}_since"] = since or Value(None, output_field=DateTimeField())
        columns[f"delayq{number}_pending"] = Subquery(pending.values("id")[:1], output_field=BigIntegerField())
        columns[f"delayq{number}_round"] = Subquery(pending.values("since_at")[:1], output_field=DateTimeField())
        columns[f"delayq{number}_closed"] = (
            Exists(rows.filter(CLOSING, since_at=OuterRef(policy.since)))
            if isinstance(policy.since, str)
            else Value(None, output_field=IntegerField())
        )
        columns[f"delayq{number}_after"] = delay_in_force(policy, using)
    return cast("QuerySet[Any, Any]", rows_of(model, using).annotate(**columns).values_list("pk", *columns))


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
