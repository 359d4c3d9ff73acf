"""The statements with which schedulers and operators write rows: insert, replace, move, cancel, revive.

Each function writes inside a transaction that has locked the business row and the timeout row, and notifies Redis on
commit. Several rows are written in the order of their slots, because two bulk calls over the same rows in different
orders would deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models import Exists, F, OuterRef

from django_delayq import clock
from django_delayq.dialects import dialect_of
from django_delayq.ledger.history import RENAMED, SINCE_CHANGED, clipped, record
from django_delayq.ledger.locking import (
    as_it_is,
    can_lock_and_write,
    in_state,
    lock_in_slot_order,
    lock_newest,
    locking_object,
)
from django_delayq.ledger.outbox import push_rows, withdraw
from django_delayq.ledger.paging import chunks
from django_delayq.ledger.statements import Raw, compiled, param, params, sql_of, update
from django_delayq.models import Timeout, new_idempotency_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from django.db.models import Model
    from django.db.models.sql import UpdateQuery

    from django_delayq.ledger.subjects import Subject
    from django_delayq.models import TimeoutQuerySet

State, Cause = Timeout.State, Timeout.Cause

# The columns that replacing a pending row overwrites. Not `first_due_at` and `extensions`: else a caller that may
# extend a cart three times could keep it indefinitely by replacing its timeout.
ROUND_FIELDS = (
    "policy",
    "queue",
    "due_at",
    "run_at",
    "since_at",
    "attempts",
    "payload",
    "history",
    "reason",
    "created_at",
    "idempotency_key",
    "slot",
    "claims",
    "claimed_until",
)
SETTLED_FIELDS = ("state", "cause", "settled_at", "slot_taken", "reason", "history")
# Columns of which every new row has the same value, as SQL: fewer parameters take less time.
_NEW = {
    "state": "'pending'",
    "cause": "''",
    "extensions": "0",
    "attempts": "0",
    "settled_at": "NULL",
    "slot_taken": "1",
    "claims": "0",
    "claimed_until": "NULL",
}
MOVED_FIELDS = ("due_at", "run_at", "history", "extensions", "claims", "claimed_until")
REVIVED_FIELDS = ("run_at", "attempts", "final_attempt", "claims", "claimed_until")


def new_row(
    subject: Subject, due_at: datetime, since_at: datetime | None, *, payload: Any = None, reason: str = ""
) -> Timeout:
    """Return an unsaved pending row for `subject`."""
    return Timeout(
        policy=subject.labels[0],
        content_type_id=subject.content_type_id,
        object_id=subject.object_id,
        key=subject.key,
        queue=subject.policy.queue if subject.policy else "default",
        due_at=due_at,
        run_at=due_at,
        since_at=since_at,
        first_due_at=due_at,
        payload=payload,
        reason=clipped(reason),
        created_at=clock.now(),
        slot=subject.slots[0],
    )


def insert_if_free(row: Timeout, subject: Subject, *, lock: bool = False) -> bool:
    """Insert `row` if no row is pending in its slot; return whether it was inserted.

    With `lock` the same statement locks the object, and gives `row` the value of the policy's `since` column. Then
    False, after which nothing is written, may also mean that the object is gone, or that one statement cannot do this
    here: the caller locks the object and proceeds step by step.
    """
    policy, using = subject.policy, subject.using
    if len(subject.slots) > 1:  # a row under a former label has another slot
        return False
    if not lock:
        return _insert_if_free(row, using)
    if policy is None or callable(policy.since) or not can_lock_and_write(policy.model, using):
        return False
    return _insert_if_free(row, using, policy.model, policy.since, subject.pk)


def _insert_if_free(
    row: Timeout, using: str, model: type[Model] | None = None, since: str | None = None, pk: Any = None
) -> bool:
    if connections[using].features.can_return_columns_from_insert:
        found = _inserted.rows(using, model, since, **vars(row), pk=pk)
    else:
        _inserted.execute(using, model, since, **vars(row), pk=pk)
        rows = Timeout.objects.using(using).filter(slot=row.slot, slot_taken=1)
        found = list(rows.values_list("pk", "idempotency_key"))
    if not found or found[0][1] != row.idempotency_key:  # MySQL and MariaDB find the row that has the slot, too
        return False
    row.pk, _, *since_at = found[0]
    row.since_at = since_at[0] if since_at else row.since_at
    row._state.adding, row._state.db = False, using
    push_rows([row], using, earlier_only=True)
    return True


@compiled
def _inserted(using: str, model: type[Model] | None, since: str | None) -> Raw:
    connection = connections[using]
    quoted = connection.ops.quote_name
    columns: list[Any] = [field for field in Timeout._meta.concrete_fields if not field.primary_key]
    known = {**_NEW, "since_at": "delayq_since"} if since else _NEW
    values = [known.get(field.name, "%s") for field in columns]
    parameters: list[Any] = [param(field.name) for field, value in zip(columns, values, strict=True) if value == "%s"]
    lock, source = "", f"VALUES ({', '.join(values)})"
    if model is not None:
        lock, first = locking_object(model, using, **({"delayq_since": F(since)} if since else {}))
        parameters = [*first, *parameters]
        # WHERE, because SQLite would read ON as the condition of a join.
        source = f"SELECT {', '.join(values)} FROM locked WHERE 1 = 1"
    names = ", ".join(quoted(each.column) for each in columns)
    keep = dialect_of(connection).on_conflict_keep
    sql = f"{lock} INSERT INTO {quoted(Timeout._meta.db_table)} ({names}) {source} {keep}"
    if not connection.features.can_return_columns_from_insert:
        return Raw(sql, parameters)
    returning: Any = [
        Timeout._meta.get_field(name) for name in ("id", "idempotency_key", *(["since_at"] if since else []))
    ]
    return Raw(f"{sql} RETURNING {', '.join(quoted(field.column) for field in returning)}", parameters, returning)


def insert(rows: Sequence[Timeout], using: str, *, replace: bool = False, earlier_only: bool = True) -> None:
    """Insert `rows` where their slots are free, and set the id of each to that of the pending row in its slot.

    A slot that was taken keeps its row as it is, or with `replace` begins a new round with the new values.
    `earlier_only`: no slot was taken, so Redis has no wrong entry. An upsert, because an IntegrityError would leave
    the caller's PostgreSQL transaction unusable.
    """
    if len(rows) == 1 and not replace and _insert_if_free(rows[0], using):
        return
    features = connections[using].features
    for chunk in chunks(sorted(rows, key=lambda row: row.slot)):
        Timeout.objects.using(using).bulk_create(
            chunk,
            update_conflicts=True,
            update_fields=ROUND_FIELDS if replace else ("slot",),
            unique_fields=("slot", "slot_taken") if features.supports_update_conflicts_with_target else None,
        )
        if len(chunk) > 1 or chunk[0].pk is None:  # MySQL returns no ids, and no database promises their order
            slots = [row.slot for row in chunk]
            taken = as_it_is(Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1), using)
            ids = dict(taken.values_list("slot", "id"))
            for row in chunk:
                row.pk = ids.get(row.slot)
    push_rows(rows, using, earlier_only=earlier_only)


def upsert(new: Timeout, subject: Subject) -> Timeout:
    """Insert `new`, or begin a new round with its values in the pending row of `subject`; return the row."""
    using = subject.using
    if insert_if_free(new, subject):
        return new
    row = adopt(subject)
    if row is None:
        insert([new], using, replace=True)
        return new
    for name in ROUND_FIELDS:
        setattr(row, name, getattr(new, name))
    update_each([row], ROUND_FIELDS, using)
    push_rows([row], using)
    return row


def move_rows(
    moves: Iterable[tuple[Timeout, datetime, datetime]],
    using: str,
    *,
    what: str,
    at: datetime,
    by: str,
    reason: str = "",
    to: datetime | None = None,
    extended: bool = False,
    columns: Sequence[str] = (),
) -> list[Timeout]:
    """Move pending, locked rows to other deadlines, in one statement; return the rows.

    Args:
        moves: each row with its new `due_at` and `run_at`; see `run_at_of`.
        using: the database.
        what, at, by, reason, to: the event that is added to the history of each row; `to` is by default its new
            `due_at`.
        extended: count the move as one of `max_extensions`.
        columns: further columns that the caller has changed.
    """
    rows = []
    for row, due_at, run_at in moves:
        record(row, what, at, by=by, reason=reason, **{"from": row.due_at, "to": to or due_at})
        row.due_at, row.run_at, row.extensions = due_at, run_at, row.extensions + extended
        row.claims, row.claimed_until = 0, None
        rows.append(row)
    update_each(rows, (*MOVED_FIELDS, *columns), using)
    push_rows(rows, using)
    return rows


def run_at_of(row: Timeout, due_at: datetime) -> datetime:
    """Return when to run `row` if it is moved to `due_at`: a retry or a snooze that waits longer continues to wait."""
    return max(row.run_at, due_at) if row.run_at > row.due_at else due_at


def restart_rows(rounds: Iterable[tuple[Timeout, datetime, datetime]], using: str) -> list[Timeout]:
    """Begin new rounds in pending, locked rows: each with the `since_at` and `due_at` of its round; return the rows."""
    moves = []
    for row, since_at, due_at in rounds:
        row.since_at, row.first_due_at, row.attempts, row.extensions = since_at, due_at, 0, 0
        row.idempotency_key = new_idempotency_key()
        moves.append((row, due_at, due_at))
    columns = ("since_at", "first_due_at", "attempts", "idempotency_key")
    at = clock.now()
    return move_rows(moves, using, what="rescheduled", at=at, by="save", reason=SINCE_CHANGED, columns=columns)


def cancel(entries: Mapping[int, str], using: str, cause: Timeout.Cause, reason: str = "") -> int:
    """Cancel the pending rows among `entries`, ids with their queues; return how many there were."""
    if not entries:
        return 0
    ids = list(entries)
    ids += ids[-1:] * ((1 << (len(ids) - 1).bit_length()) - len(ids))  # few lengths, so that few statements are kept
    now, reason = clock.now(), clipped(reason)
    cancelled = _cancelled_ids.execute(using, len(ids), id=ids, cause=cause, reason=reason, settled_at=now)
    withdraw(((queue, row_id) for row_id, queue in entries.items()), using)
    return cancelled


@compiled
def _cancelled_ids(using: str, count: int) -> UpdateQuery:
    rows = Timeout.objects.using(using).filter(pk__in=params("id", count), slot_taken=1)
    given = {name: param(name) for name in ("cause", "reason", "settled_at")}
    return update(rows, state=State.CANCELLED, slot_taken=None, **given)


def cancel_pending(subject: Subject, reason: str, *, lock: bool) -> Timeout | None:
    """Cancel the pending round of `subject` by hand, in one statement, if it is the newest; return its row.

    None, and nothing is written: there is none, or one statement cannot do this here.

    Args:
        subject: what to cancel.
        reason: is stored.
        lock: lock the object in the same statement; otherwise the transaction has locked it.
    """
    policy, using = subject.policy, subject.using
    if policy is None or subject.row_id is not None or not can_lock_and_write(policy.model, using):
        return None
    values = {"slot": subject.slots, "pk": subject.pk, "settled_at": clock.now(), "reason": clipped(reason)}
    found = _cancelled.objects(using, policy.model if lock else None, len(subject.slots), **values)
    if not found:
        return None
    withdraw([(found[0].queue, found[0].pk)], using)
    return cast("Timeout", found[0])


@compiled
def _cancelled(using: str, model: type[Model] | None, slots: int) -> Raw:
    """While the statement waits for the object, the row may be fired; then it does not match any more."""
    rounds = Timeout.objects.using(using).filter(slot__in=params("slot", slots))
    newer = rounds.filter(pk__gt=OuterRef("pk"))
    values = {"state": State.CANCELLED, "cause": Cause.HAND, "slot_taken": None}
    pending = rounds.filter(slot_taken=1).filter(~Exists(newer))
    sql, parameters = sql_of(update(pending, **values, settled_at=param("settled_at"), reason=param("reason")), using)
    if model is not None:
        lock, first = locking_object(model, using)
        sql, parameters = f"{lock} {sql} AND EXISTS (SELECT 1 FROM locked)", (*first, *parameters)
    fields: Any = Timeout._meta.concrete_fields
    quoted = connections[using].ops.quote_name
    table = quoted(Timeout._meta.db_table)
    columns = ", ".join(f"{table}.{quoted(field.column)}" for field in fields)
    return Raw(f"{sql} RETURNING {columns}", parameters, fields)


def cancel_rows(rows: Sequence[Timeout], using: str, reason: str, now: datetime) -> None:
    """Cancel the locked `rows`, pending or dead, by hand, and write their histories."""
    for row in rows:
        row.state, row.cause, row.settled_at, row.slot_taken = State.CANCELLED, Cause.HAND, now, None
        row.reason = clipped(reason)
    update_each(rows, SETTLED_FIELDS, using, (State.PENDING, State.DEAD))
    withdraw([(row.queue, row.pk) for row in rows], using)


def revive(rows: Sequence[Timeout], using: str, now: datetime) -> None:
    """Make the dead, locked `rows`, whose slots are free, pending and due now, without attempts."""
    for row in rows:
        row.state, row.cause, row.settled_at, row.slot_taken, row.reason = State.PENDING, "", None, 1, ""
        row.run_at, row.attempts, row.final_attempt, row.claims, row.claimed_until = now, 0, False, 0, None
    update_each(rows, (*SETTLED_FIELDS, *REVIVED_FIELDS), using, (State.DEAD,))
    push_rows(rows, using)


def forbid_attempts(row: Timeout, reason: str, by: str = "hand") -> None:
    """Give the `row` that is firing no further attempt if this one fails."""
    record(row, "cancel_requested", clock.now(), by=by, reason=reason)
    _if_still(row, State.FIRING).update(final_attempt=True, history=row.history)


def note_condition(row: Timeout) -> None:
    """Count a round that was cancelled by hand as cancelled by its condition, so that it may be armed again."""
    _if_still(row, State.CANCELLED).filter(cause=Cause.HAND).update(cause=Cause.CONDITION)
    row.cause = Cause.CONDITION


def adopt(subject: Subject) -> Timeout | None:
    """Lock the pending row of `subject`; give it the present label of its policy, if it has a former one; return it.

    Without this, renaming a policy would let one object have two pending timeouts. If there are two already, which
    old and new code armed side by side during a deployment, the one under the former label is cancelled.
    """
    if len(subject.slots) == 1:
        return lock_newest(subject, pending=True)
    rows = lock_in_slot_order(subject.pending(), subject.using)
    present = next((row for row in rows if row.slot == subject.slots[0]), None)
    for row in rows:
        if row.slot == subject.slots[0]:
            continue
        if present is not None:
            cancel({row.pk: row.queue}, subject.using, Cause.SUPERSEDED, RENAMED)
            continue
        row.policy, row.slot, present = subject.labels[0], subject.slots[0], row
        update_each([row], ("policy", "slot"), subject.using)
    return present


def update_each(
    rows: Sequence[Timeout], names: Sequence[str], using: str, states: Sequence[Timeout.State] = (State.PENDING,)
) -> None:
    """Write the columns `names` of each of `rows`, as the instance has them, if the row is still in one of `states`.

    One statement, sent for all rows. Not `bulk_update`: for 500 rows it builds thousands of expressions, and takes more
    time in Python than the database takes to write them.
    """
    if rows:
        each = [{name: getattr(row, name) for name in ("id", *names)} for row in rows]
        _written.execute_many(using, tuple(names), tuple(states), each=each)


@compiled
def _written(using: str, names: tuple[str, ...], states: tuple[Timeout.State, ...]) -> UpdateQuery:
    rows = Timeout.objects.using(using).filter(pk=param("id"))
    rows = dialect_of(connections[using]).in_states(rows, states)
    return update(rows, **{name: param(name) for name in names})


def _if_still(row: Timeout, state: Timeout.State) -> TimeoutQuerySet:
    using = row._state.db or DEFAULT_DB_ALIAS
    return in_state(Timeout.objects.using(using).filter(pk=row.pk), state, using)
