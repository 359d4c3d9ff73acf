"""The statements by which workers lock and change rows. Each compares before it sets.

All of it runs inside a transaction. Rows come from `lock_rows`, which does not wait, so that they are unchanged when
they are written; only `mark_at_once` locks them itself. The comparison in the UPDATE decides nevertheless, because
SQLite locks no rows and the clock of a worker proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from django.db import Error, connections
from django.db.models import Case, CharField, F, Model, Q, QuerySet, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce
from django.db.models.sql import UpdateQuery

from django_delayq.conf import get_settings
from django_delayq.ledger.controls import stop_in_force
from django_delayq.ledger.locking import (
    can_lock_and_write,
    for_update,
    raising_instead_of_waiting,
    rows_of,
    transaction_of,
)
from django_delayq.ledger.rollups import SettledRow, leave
from django_delayq.ledger.subjects import object_id
from django_delayq.ledger.writing import hold_rows
from django_delayq.models import Timeout, TimeoutQuerySet, attempt_expired
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.policy.reads import reads_other_rows
from django_delayq.policy.terms import reads_again
from django_delayq.rounds.columns import RUNNING_CLOCK, firing, settled
from django_delayq.rounds.memory import clipped
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.key_types import array_of, object_id_of
from django_delayq.sql.now import DatabaseNow, database_now
from django_delayq.sql.statements import (
    CHUNK,
    Param,
    Raw,
    compiled,
    elements_of,
    has_key,
    key_list,
    param,
    selected,
    sql_of,
    update,
)

State, Cause = Timeout.State, Timeout.Cause
MATCHES: Final = 1
"""The result of `matches` for an object that matches, and is not on hold; 0: it does not match."""
ON_HOLD: Final = 2
"""Its result for an object that matches, but is on hold."""
_UNREAD: Final = ("history", "stops", *(name for name in RUNNING_CLOCK if name != "state"))
"""The columns that a firing does not read: the history may be large, and the clock of a row that is due runs."""
# fmt: off
_INTERNAL: Final = {
    "terms", "computed_due_at", "share", "steps_over", "slot", "slot_taken", "final_attempt", "claims", "claimed_until",
    "is_guarded", "is_due_by_request", "suspected_at", "deaths", "erased_at", "first_failed_at", "last_failed_at",
}
# fmt: on
"""Further columns that neither a firing in one statement nor a handler reads. Each takes time in server and driver."""
_ROW: Final = [field for field in Timeout._meta.concrete_fields if field.name not in _INTERNAL.union(_UNREAD)]
_COLUMNS: Final = dict.fromkeys(field.attname for field in _ROW)  # a dict, because Django searches it for each field


class Locked(NamedTuple):
    """Locked rows by id, the time by the database clock, and whether their policy is stopped."""

    rows: dict[int, Timeout]
    now: datetime
    is_stopped: bool = False


def lock_rows(
    ids: Collection[int], using: str, *, history: bool = False, policy: TimeoutPolicy[Any] | None = None
) -> Locked:
    """Lock the rows `ids`, except those that are locked already; return them fresh, and the database's time.

    The history, which may be large, and the columns of the clock are loaded only on demand, or here with `history`.
    The statement reads whether `policy`, if given, is stopped after its time, so nothing that was committed before that
    time is missed.
    """
    wanted, count = key_list(Timeout, ids, using)
    found = _locked.objects(using, count, history, policy, id=wanted) if ids else []
    if not found:
        return Locked({}, database_now(using))
    read = vars(found[0])
    return Locked({row.pk: row for row in found}, read["database_now"], read.get("is_stopped", False))


@compiled
def _locked(using: str, count: int, history: bool, policy: TimeoutPolicy[Any] | None) -> QuerySet[Any]:
    rows: Any = Timeout.objects.using(using).filter(has_key(Timeout, "id", count, using)).order_by("pk")
    rows = rows.annotate(database_now=DatabaseNow())
    if policy is not None:
        rows = rows.annotate(is_stopped=stop_in_force(policy))
    return for_update(rows if history else rows.defer(*_UNREAD), using, wait=False)


def lock_free(rows: TimeoutQuerySet, using: str) -> list[int]:
    """Lock those of `rows` that no other transaction has locked; return their ids.

    An UPDATE of many rows would wait for the others: for a running handler, or for a request that waits for one of
    the rows which the UPDATE has already locked.
    """
    return list(for_update(rows.order_by("pk"), using, wait=False).values_list("pk", flat=True))


def update_free(rows: TimeoutQuerySet, using: str, **values: Any) -> list[int]:
    """Write `values` into those of `rows` that no other transaction has locked; return their ids."""
    with transaction_of(using):
        free = lock_free(rows, using)
        Timeout.objects.using(using).filter(pk__in=free).update(**values)
    return free


def mark_fired(rows: Sequence[Timeout], now: datetime, using: str) -> bool:
    """Mark the pending `rows` as fired. Return False if one of them is not due: then the caller must roll back."""
    ids, count = key_list(Timeout, [row.pk for row in rows], using)
    with raising_instead_of_waiting(using):
        marked = _mark_fired.execute(using, count, id=ids, settled_at=now)
    if marked != len(rows):
        return False
    values = settled(State.FIRED, Cause.DUE, now)
    for row in rows:
        vars(row).update(values, attempts=row.attempts + 1)
    return True


@compiled
def _mark_fired(using: str, count: int) -> UpdateQuery:
    values = {**settled(State.FIRED, Cause.DUE, param("settled_at")), "attempts": F("attempts") + 1}
    return update(_due(has_key(Timeout, "id", count, using), using), **values)


@lru_cache(maxsize=1000)
def can_mark_at_once(policy: TimeoutPolicy[Any], using: str) -> bool:
    """Return whether `mark_at_once` serves `policy`: on PostgreSQL, and for handlers that run in the transaction.

    Not for batches, for policies that have steps or ask before they act, and for conditions that read other rows, which
    the statement would lock too. Nor if deadlines follow columns, which are read again before they fire.
    """
    if not connections[using].features.has_select_for_update or not policy.atomic or policy.batch:
        return False
    if policy.confirmation is not None or policy.steps or reads_other_rows(policy) or reads_again(policy):
        return False
    return can_lock_and_write(policy.model, using) and not cast("Any", policy.model._meta.pk).is_relation


def mark_at_once(
    policy: TimeoutPolicy[Any], pks: Mapping[int, Any], using: str, *, late: timedelta | None
) -> list[tuple[Timeout, Any]]:
    """Lock the objects `pks` and their rows, by whose ids they are given, check both, and mark the rows as fired.

    Return the rows that were marked, without their history, each with its object. The others are as they were, and
    the answer does not say why: not due, too late, stopped, locked by another transaction, or the object is gone,
    locked by another transaction, on hold, or does not match.

    It is one statement with one snapshot, and waits for no lock. Where a row has changed since the snapshot and its
    lock is free, PostgreSQL (EvalPlanQual) evaluates conditions and columns again on the latest version, which it
    locks. So a cancel that was committed in between prevents the firing. `late`: see `LateRail`.
    """
    model: type[Model] = policy.model
    if is_single := len(pks) == 1:
        [(given_id, pk)] = pks.items()
        keys = {"id": str(given_id), "pk": object_id_of(model, pk)}
    else:
        keys = {"id": array_of(Timeout, pks), "pk": array_of(model, pks.values())}
    found = _marked_at_once.rows(using, policy, late, is_single, is_first=True, **keys)
    own, size = [field.attname for field in model._meta.concrete_fields], len(_COLUMNS)
    return [(Timeout.from_db(using, _COLUMNS, row[:size]), model.from_db(using, own, row[size:])) for row in found]


@compiled
def _marked_at_once(using: str, policy: TimeoutPolicy[Any], late: timedelta | None, is_single: bool) -> Raw:
    """Look up each object and each row by its key, with LATERAL.

    For a list of keys PostgreSQL may read the whole table, and does so with a plan that it has kept since the table was
    small: up to seven times the CPU of a firing.
    """
    model, key, connection = policy.model, cast("Any", policy.model._meta.pk), connections[using]
    quoted, ledger = connection.ops.quote_name, connection.ops.quote_name(Timeout._meta.db_table)
    objects = rows_of(model, using).filter(pk__in=[RawSQL("delayq_given.pk", ())])
    objects = objects.annotate(delayq_id=object_id(F(key.name), model, using), delayq_matches=matches(policy))
    own = [f"c{number}" for number in range(len(model._meta.concrete_fields))]
    due: Any = _due(Q(pk__in=[RawSQL("delayq_given.id", ())]), using)
    due = due.alias(label=_by_no_index("policy"), about=_by_no_index("object_id"))
    due = due.filter(label__in=policy.labels, about=RawSQL("locked.object_id", ()))
    due = due.exclude(stop_in_force(policy))
    if late is not None:
        due = due.filter(Q(attempts__gt=0) | Q(run_at__gte=DatabaseNow() - late))
    values = {**settled(State.FIRED, Cause.DUE, DatabaseNow()), "attempts": F("attempts") + 1}
    parts = (
        sql_of(for_update(objects, using, wait=False), using),
        sql_of(for_update(due.order_by().values_list("pk"), using, wait=False), using),
        sql_of(update(Timeout.objects.using(using), **values), using),
    )
    (locked, _), (checked, _), (marked, _) = parts
    ids, keys = (f"%s::{elements_of(each, using)}" for each in (Timeout, model))
    given = f"(SELECT {ids} AS id, {keys} AS pk) AS" if is_single else f"unnest({ids}[], {keys}[]) AS"
    fields = [*_ROW, *model._meta.concrete_fields]
    columns = [f"{ledger}.{quoted(cast('str', field.column))}" for field in _ROW] + [f"due.{name}" for name in own]
    returned = [selected(column, field, connection) for column, field in zip(columns, fields, strict=True)]
    sql = (
        f"WITH due AS MATERIALIZED (SELECT delayq_given.id, locked.* FROM {given} delayq_given (id, pk)"
        f" CROSS JOIN LATERAL ({locked}) AS locked ({', '.join(own)}, object_id, matches)"
        f" CROSS JOIN LATERAL ({checked}) AS checked)"
        f" {marked} FROM due WHERE {ledger}.id = due.id AND due.matches = {MATCHES} RETURNING {', '.join(returned)}"
    )
    parameters = [Param(CharField(), "id"), Param(CharField(), "pk"), *(each for _, given in parts for each in given)]
    return Raw(sql, parameters, fields, is_prepared=is_single)


def count_from_resume(rows: Sequence[Timeout], using: str) -> None:
    """Store the `ready_at` that the locked `rows` have in common, from which their lateness counts."""
    Timeout.objects.using(using).filter(pk__in=[row.pk for row in rows]).update(ready_at=rows[0].ready_at)


def defer(row: Timeout, run_at: datetime, using: str) -> None:
    """Let the pending, locked `row` run at `run_at` at the earliest; no attempt is counted."""
    write_pending([row], using, run_at=run_at, ready_at=run_at)


def write_pending(rows: Sequence[Timeout], using: str, **values: Any) -> None:
    """Write `values` into the pending, locked `rows`; without waiting for a lock that SKIP LOCKED cannot see."""
    with raising_instead_of_waiting(using):
        Timeout.objects.using(using).filter(pk__in=[row.pk for row in rows], slot_taken=1).update(**values)
    for row in rows:
        vars(row).update(values)


def matches(policy: TimeoutPolicy[Any]) -> Any:
    """Return an expression for whether the condition of `policy`, on columns of the object, holds: `MATCHES` or 0.

    `ON_HOLD` if `hold_when` holds, too.
    """
    cases = [When(policy.hold_when & (policy.when or Q()), then=Value(ON_HOLD))] if policy.hold_when else []
    if policy.when:
        return Case(*cases, When(policy.when, then=Value(MATCHES)), default=Value(0))
    return Case(*cases, default=Value(MATCHES)) if cases else Value(MATCHES)


def mark_held(rests: Sequence[tuple[Timeout, timedelta]], now: datetime, using: str) -> None:
    """Stop the clocks of pending, due, locked rows, each with the rest of its time; no attempt is counted."""
    for row, _ in rests:
        vars(row).update(RUNNING_CLOCK)  # which `lock_rows` does not read
    with raising_instead_of_waiting(using):
        hold_rows(rests, using, at=now)


def mark_firing(row: Timeout, until: datetime, using: str, *, suspected_at: datetime | None = None) -> bool:
    """Mark the pending `row` as firing until `until`, count its attempt, free its slot. Return False: it is not due.

    `suspected_at`: now, if it runs alone in its process.
    """
    return move_on(row, using, **firing(until, row.attempts + 1), suspected_at=suspected_at)


def move_on(row: Timeout, using: str, **values: Any) -> bool:
    """Write the `values` of what follows the step of the due, locked `row`. Return False: it is not due."""
    with raising_instead_of_waiting(using):
        if not _due(Q(pk=row.pk), using).filter(attempts=row.attempts).update(**values):
            return False
    vars(row).update(values)
    return True


def is_marked(row_id: int, using: str, before: Timeout | None = None) -> bool:
    """Return whether the current transaction still works, and still sees the row as fired.

    `before`: the row of a step before it was marked, which then must be another one.
    """
    is_other = Q(state=State.FIRED) if before is None else ~Q(step=before.step, steps_over=before.steps_over)
    try:
        return Timeout.objects.using(using).filter(is_other, pk=row_id).exists()
    except Error:
        return False


def mark_settled(
    rows: Sequence[Timeout],
    cause: Timeout.Cause,
    now: datetime,
    using: str,
    *,
    state: Timeout.State = State.SKIPPED,
    reason: str = "",
) -> None:
    """Settle the pending, locked `rows` without firing them, by default as skipped."""
    write_pending(rows, using, **settled(state, cause, now), reason=clipped(reason))


def compare_and_set(row: Timeout, using: str, **values: Any) -> bool:
    """Write `values` if `row` was not moved, settled, restarted or tried since it was read; else return False.

    A row that takes its slot again does not wait for a transaction that has scheduled the next round in it: that one
    may wait for the row, or stay open for long. Raises the error of the database. The caller then commits at once.
    """
    unchanged = {name: getattr(row, name) for name in ("state", "attempts", "run_at", "idempotency_key")}
    connection = connections[using]
    if values.get("slot_taken") and not row.slot_taken and (statement := dialect_of(connection).wait_briefly):
        connection.cursor().execute(statement)
    with raising_instead_of_waiting(using):
        if not Timeout.objects.using(using).filter(pk=row.pk, **unchanged).update(**values):
            return False
    vars(row).update(values)
    return True


def forget_suspicion(ids: Collection[int], using: str) -> list[int]:
    """Let the outcomes of pending rows count as known; return those that another transaction has locked."""
    pending = Timeout.objects.using(using).filter(pk__in=ids, state=State.PENDING)
    free = update_free(pending, using, suspected_at=None)
    return list(pending.exclude(pk__in=free).values_list("pk", flat=True)) if len(free) < len(ids) else []


def is_superseded(row: Timeout, using: str) -> bool:
    """Return whether a newer round than that of `row` was scheduled.

    Also if the newer one has ended: the caller that cancelled it was promised that nothing will happen. But not if it
    was superseded itself, because `since` came back to the value of `row`. So of the rounds of one slot that were not
    superseded, only the newest is pending: `operations.retry` refuses the others.
    """
    newer = Timeout.objects.using(using).filter(slot=row.slot, pk__gt=row.pk).exclude(cause=Cause.SUPERSEDED)
    return bool(newer.exists())


def expired(using: str, limit: int, ids: Collection[int] | None = None) -> list[Timeout]:
    """Return at most `limit` rows, only `ids` if given, whose attempt has expired, the longest expired first."""
    has_expired = attempt_expired(get_settings().longest_lease)
    rows = Timeout.objects.using(using).filter(has_expired, state=State.FIRING, settled_at__isnull=True)
    if ids is not None:
        rows = rows.filter(pk__in=ids)
    return list(rows.only("policy", "object_id", "state", "attempts", "run_at").order_by("run_at", "pk")[:limit])


def extend(ids: Collection[int], until: datetime, using: str) -> bool:
    """Let those of `ids` that are firing expire at `until`, except those that are locked. Return whether none is.

    A row that is locked cannot be settled by another worker either. To wait for it would let the others expire.
    """
    found = Timeout.objects.using(using).filter(pk__in=ids)
    unknown = dialect_of(connections[using]).in_states(found, [State.FIRING])
    free = update_free(unknown, using, run_at=until)
    return not unknown.exclude(pk__in=free).exists()


class Old(NamedTuple):
    """Which settled rows are old: those from before `before`, with one of `labels` if there are any, and none of `but`.

    Policies have retentions of their own, so that one pass deletes by several of these.
    """

    before: datetime
    labels: tuple[str, ...] = ()
    but: tuple[str, ...] = ()


def prunable(using: str, old: Old) -> TimeoutQuerySet:
    """Return the `old` rows: they were settled before, and their first and last deadlines are before it, too.

    A row that was moved to an earlier deadline, and fired, closes its round: without it, arming would find the first
    deadline in the future, and the round would fire a second time.
    """
    before = old.before
    rows = Timeout.objects.using(using).filter(settled_at__lt=before, due_at__lt=before, first_due_at__lt=before)
    rows = rows.of_labels(old.labels) if old.labels else rows
    return rows.exclude(policy__in=old.but) if old.but else rows


def delete_settled(using: str, old: Old, start: datetime | None) -> tuple[int, datetime | None]:
    """Delete a page of the `prunable` rows that were settled from `start` on, and count them for reports.

    A larger page would hold locks, and bloat the log of the database. Return how many, and the `start` of the next
    page; None: there are no more. So rows that must stay are read once, and not once a page. Sorted by `settled_at`
    alone, as the index is: with ids PostgreSQL would sort all rows that were settled by one bulk call, for each page
    again.
    """
    found = prunable(using, old)
    rows = found if start is None else found.filter(settled_at__gte=start)
    page = list(rows.order_by("settled_at").values_list("settled_at", "id")[:CHUNK])
    with transaction_of(using):
        # Read again, because an operator may have revived one in between. A row that another transaction has locked
        # stays until the next time: that transaction may be waiting for another row of the page.
        free = found.filter(pk__in=lock_free(found.filter(pk__in=[id for _, id in page]), using))
        leave([SettledRow(*values) for values in free.values_list(*SettledRow._fields)], using, are_deleted=True)
        count, _ = free.delete()
    return count, page[-1][0] if count and len(page) == CHUNK else None


def _due(named: Any, using: str) -> TimeoutQuerySet:
    """Return the pending and due rows, found by `named`, a condition on ids. Not by the state: see `in_states`."""
    rows = Timeout.objects.using(using).alias(taken=_by_no_index("slot_taken"), begins_at=_by_no_index("run_at"))
    return rows.filter(named, taken=1, begins_at__lte=DatabaseNow())


def _by_no_index(column: str) -> Coalesce:
    """Return the value of `column`, of which PostgreSQL does not see that an index has it, or depends on it.

    The statistics do not count 10,000 rows that have just been inserted or become due. PostgreSQL expected very few due
    rows of a policy, and for each firing read all 10,000 by the index on policy and time: a third more CPU of the
    server.
    """
    return Coalesce(column, column)
