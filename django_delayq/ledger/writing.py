"""The statements that write rows for schedulers or operators: insert, replace, move, cancel, revive.

Each function writes inside a transaction that has locked the business row and the timeout row, and notifies Redis on
commit. `insert_if_free` and `cancel_pending` on request, and `replace_at_once`, lock and write in one statement, also
outside a transaction. Several rows are written in the order of their slots, because two bulk calls over the same rows
in different orders would deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from django_delayq.ledger.locking import can_lock_and_write, lock_clause, locking_update, read_committed
from django_delayq.ledger.outbox import Line, announce, push_rows, remove_entries, remove_ids
from django_delayq.ledger.paging import insert_statement, update_each
from django_delayq.ledger.planned import begin, planning_policy
from django_delayq.ledger.rollups import leave
from django_delayq.ledger.shares import set_shares
from django_delayq.ledger.subjects import Subject, lock_newest
from django_delayq.ledger.traces import current_trace
from django_delayq.models import WAITING, Timeout, new_idempotency_key
from django_delayq.rounds import events
from django_delayq.rounds.columns import DEFAULTS, REPLACED, RUNNING_CLOCK, TIMES, settled
from django_delayq.rounds.memory import clipped
from django_delayq.signals import timeout_cancelled
from django_delayq.sql import statements
from django_delayq.sql.now import DatabaseNow, column_within_calendar
from django_delayq.sql.statements import Raw, chunks, compiled, padded, param, params, update
from django_delayq.times import clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from django.db.models import Model
    from django.db.models.sql import UpdateQuery

    from django_delayq.policy.policies import TimeoutPolicy
    from django_delayq.rounds.events import Facts, Plan

State, Cause = Timeout.State, Timeout.Cause

_OWN: Final = [each for each in DEFAULTS.items() if each[0] not in {"policy", "content_type_id"}]
"""The defaults of the columns that rows of one policy and model do not have in common."""
_READ_BACK: Final = tuple(each.name for each in Timeout._meta.concrete_fields if each.name not in RUNNING_CLOCK)
"""The columns of a replaced row that are not known."""


def new_row(
    subject: Subject, due_at: datetime, since_at: datetime | None, *, reason: str = "", obj: Any = None, **columns: Any
) -> Timeout:
    """Return an unsaved pending row for `subject`; `columns` are those that differ from other new rows.

    `obj`: its object, which may be None unless the plan of its policy needs it.
    """
    given: dict[str, Any] = {
        "policy": subject.labels[0],
        "content_type_id": subject.content_type_id,
        "object_id": subject.object_id,
        "key": subject.key,
        "queue": subject.policy.queue if subject.policy else "default",
        **dict.fromkeys(TIMES, due_at),
        "since_at": since_at,
        "history": [],
        "reason": clipped(reason),
        "created_at": clock.now(),
        "idempotency_key": new_idempotency_key(),
        "slot": subject.slot,
        "trace": current_trace(),
    }
    if columns.get("terms") is not None:
        given["computed_due_at"] = due_at
    values: Any = (DEFAULTS | given | columns).values()
    row = Timeout(*values)  # by position, which takes a third of the time
    policy = subject.policy if row.state == State.PENDING and not row.is_requested else None
    if policy and policy.has_plan:
        row.run_at = begin(row, policy, due_at, row.created_at, obj)
    if policy and policy.within is not None:
        row.run_at = policy.opening(row.run_at)
    return row


def writes_at_once(subject: Subject) -> bool:
    """Return whether one statement can lock the object of `subject`, read its `since` and write the timeout.

    Otherwise the caller locks the object and proceeds step by step. It depends on policy and database alone.
    """
    policy = subject.policy
    if policy is None or policy.has_plan or policy.within is not None or policy.share_path is not None:
        return False
    return policy.has_plain_since and can_lock_and_write(policy.model, subject.using)


def replace_at_once(new: Timeout, subject: Subject) -> Timeout | None:
    """Lock the object and begin a new round with the values of `new` in the pending row, in one statement; return it.

    For `writes_at_once`, and policies without `since`, which this UPDATE cannot read. None, and nothing is written: no
    row is pending, or the object is gone.
    """
    policy: Any = subject.policy
    rows: list[Timeout] = _replaced.objects(subject.using, policy.model, **{**vars(new), "pk": subject.pk})
    for row in rows:
        vars(row).update(RUNNING_CLOCK)
        row.note_stored()
    push_rows(rows, subject.using)
    return rows[0] if rows else None


def insert_if_free(row: Timeout, using: str, policy: TimeoutPolicy[Any] | None = None, pk: Any = None) -> bool:
    """Insert `row`, unless its slot is taken, and register its push; return whether it was inserted.

    With `policy`, which `writes_at_once`, the statement also locks the object `pk`, reads its `since`, and inserts
    nothing if there is no object.
    """
    model, since = (policy.model, policy.since) if policy else (None, None)
    values = vars(row)
    given = tuple([name for name, default in _OWN if values[name] != default])
    shape = model, since, (row.policy, row.content_type_id), given
    if connections[using].features.can_return_columns_from_insert:
        found = _inserted.rows(using, *shape, **values, pk=pk)
    else:
        _inserted.execute(using, *shape, **values, pk=pk)
        rows = Timeout.objects.using(using).filter(slot=row.slot, slot_taken=1)
        found = list(rows.values_list("pk", "since_at", "idempotency_key"))
    if not found:
        return False
    row_id, since_at, *key = found[0]
    if key and key != [row.idempotency_key]:  # MariaDB returned the row that has the slot already
        return False
    row.pk, row.since_at = row_id, since_at
    row._state.adding, row._state.db = False, using
    row.note_stored()
    push_rows([row], using, earlier_only=True)
    return True


@compiled
def _inserted(
    using: str, model: type[Model] | None, since: str | None, kind: tuple[str, int], given: tuple[str, ...]
) -> Raw:
    features = connections[using].features
    columns: dict[str, Any] = {name: param(name) for name in given}
    lock, source = ("", ()), "VALUES ({values})"
    if model is not None:
        columns |= dict.fromkeys(TIMES, "delayq_due") | ({"since_at": "delayq_since"} if since else {})
        read = {"delayq_since": column_within_calendar(since)} if since else {}
        lock = lock_clause(model, using, delayq_due=param("due_at"), **read)
        # WHERE, because SQLite would read ON as the condition of a join.
        source = "SELECT {values} FROM locked WHERE 1 = 1"
    key = () if features.supports_update_conflicts_with_target else ("idempotency_key",)
    returning = ("id", "since_at", *key) if features.can_return_columns_from_insert else ()
    common = {"policy": kind[0], "content_type_id": kind[1]}
    built = insert_statement(using, columns, source, common=common, before=lock, returning=returning)
    return built._replace(is_prepared=True)


def insert(rows: Sequence[Timeout], using: str) -> None:
    """Insert `rows` where their slots are free, and set the id of each to that of the pending row in its slot.

    A slot that was taken keeps its row as it is.
    """
    set_shares(rows, using)
    if len(rows) == 1 and insert_if_free(rows[0], using):
        return
    for chunk in chunks(sorted(rows, key=lambda row: row.slot)):
        statements.upsert(Timeout.objects.using(using), chunk, ("slot", "slot_taken"), ("slot",))
        # MySQL returns no ids, and no database promises their order.
        slots = [row.slot for row in chunk]
        taken = read_committed(Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1), using)
        ids = dict(taken.values_list("slot", "id"))
        for row in chunk:
            row.pk = ids.get(row.slot)
            row.note_stored()
    push_rows(rows, using, earlier_only=True)


def upsert(new: Timeout, subject: Subject) -> Timeout:
    """Insert `new`, or begin a new round with its values in the waiting row of `subject`; return the row.

    The transaction has locked the object. The row gets the present label of its policy.
    """
    using = subject.using
    set_shares([new], using)
    if insert_if_free(new, using):
        return new
    row = lock_newest(subject, pending=True)
    if row is None:
        insert([new], using)
        return new
    events.replace(row, new)
    return write_waiting([row], using)[0]


def move_rows(moves: Sequence[tuple[Timeout, datetime, datetime | None]], facts: Facts, **event: Any) -> list[Timeout]:
    """Move waiting, locked rows to other deadlines, in one statement; return the rows.

    A held row keeps its `run_at`. The caller has set its clock: see `events.retarget`.

    Args:
        moves: each row with its new `due_at` and `run_at`; see `run_at_of`. None: when what is next of it is planned.
            `within=` may let it run later.
        facts: of the rows.
        **event: `what`, `at`, `by` and others, see `memory.record`. `to` is by default the new `due_at`. `fixed`: the
            new deadline was given as a datetime, and does not count from the former one.
    """
    for row, due_at, attempt_at in moves:
        events.move(row, due_at, attempt_at, facts, **event)
    return write_waiting([row for row, *_ in moves], facts.using)


def write_plans(plans: Iterable[tuple[Timeout, Plan]], facts: Facts, **event: Any) -> list[Timeout]:
    """Move waiting, locked rows to the deadlines that their policies compute now; return them. `event`: see above."""
    moves = []
    for row, plan in plans:
        events.follow(row, plan)
        moves.append((row, plan.due_at, run_at_of(row, plan.due_at, facts)))
    return move_rows(moves, facts, **event)


def hold_rows(rests: Sequence[tuple[Timeout, timedelta]], using: str, *, at: datetime, **event: Any) -> list[Timeout]:
    """Stop the clocks of rows, pending or held, each with the rest of its time; return the rows.

    A held row keeps its slot, so that every statement that finds a row by its slot finds it. Its `run_at` is `far()`,
    so that no worker and no sweep finds it.

    Args:
        rests: the rows are locked. Those that are held may have another end, or another rest.
        using: the database.
        at: now.
        **event: `by` and `reason`, see `memory.record`.
    """
    for row, rest in rests:
        events.hold(row, rest, at, **event)
    return write_waiting([row for row, _ in rests], using)


def resume_rows(starts: Iterable[tuple[Timeout, datetime]], facts: Facts, **event: Any) -> list[Timeout]:
    """Let the clocks of held, locked rows run, each since its start; return the rows. `event`: see `hold_rows`."""
    rows = []
    for row, start in starts:
        events.resume(row, start, facts, at=facts.now, **event)
        rows.append(row)
    return write_waiting(rows, facts.using)


def write_waiting(rows: list[Timeout], using: str) -> list[Timeout]:
    """Write the waiting `rows`, and what Redis has of them; return them."""
    update_each(rows, using, WAITING)
    push_rows(rows, using)  # which removes the entries of those whose clock is stopped
    return rows


def run_at_of(row: Timeout, due_at: datetime, facts: Facts) -> datetime:
    """Return when to run `row` if it is moved to `due_at`: a retry or a snooze that waits longer continues to wait.

    Also one whose clock is stopped: it is not due. One that an operator wants fired has no step before its handler.
    """
    if planning_policy(row) is None or row.is_requested:
        return max(row.run_at, due_at) if row.run_at > row.due_at else due_at
    coming = facts.next_at(row, due_at)
    return max(row.run_at, coming.at) if coming.name == row.step and events.waits_longer(row, facts) else coming.at


def cancel_ids(entries: Mapping[int, Line], using: str, cause: Timeout.Cause, reason: str = "") -> int:
    """Cancel the pending rows among `entries`, ids with their lines; return how many there were."""
    if not entries:
        return 0
    ids, settled_at = padded(entries), clock.now()
    values = {"id": ids, "cause": cause, "reason": clipped(reason), "settled_at": settled_at}
    cancelled = _cancelled_ids.execute(using, len(ids), **values)
    remove_ids(entries, using)
    return cancelled


@compiled
def _cancelled_ids(using: str, count: int) -> UpdateQuery:
    rows = Timeout.objects.using(using).filter(pk__in=params("id", count), slot_taken=1)
    values = settled(State.CANCELLED, param("cause"), param("settled_at"))
    return update(rows, **values, reason=param("reason"))


def cancel_pending(subject: Subject, reason: str, *, lock: bool, in_time: bool = False) -> list[Timeout]:
    """Cancel the pending round of `subject` by hand, in one statement; return its row.

    Notify Redis and the receivers of `timeout_cancelled` on commit. No row: none is pending, or one statement cannot
    lock and compare what this policy needs.

    Args:
        subject: what to cancel.
        reason: is stored.
        lock: lock the object in the same statement, cancel only the round of its present `since`, if the policy is
            automatic, and read only the columns that this function needs. Otherwise the transaction has locked it.
        in_time: only if its deadline has not passed by the clock of the database.
    """
    policy, using, is_automatic = subject.policy, subject.using, subject.automatic_policy is not None
    if policy is None or subject.row_id is not None or not can_lock_and_write(policy.model, using):
        return []
    if lock and is_automatic and not policy.has_plain_since:
        return []
    since = policy.since if lock and is_automatic else None
    values = {"slot": subject.slot, "pk": subject.pk, "settled_at": clock.now(), "reason": clipped(reason)}
    columns = () if not lock or timeout_cancelled.receivers else ("id", "queue", "policy", "run_at")
    shape = (policy.model if lock else None, since), columns, in_time
    rows: list[Timeout] = _cancelled.objects(using, *shape, **values)
    remove_entries(rows, using)
    for row in rows:
        announce(timeout_cancelled, row, using)
    return rows


@compiled
def _cancelled(using: str, locked: tuple[type[Model] | None, str | None], columns: Sequence[str], in_time: bool) -> Raw:
    """While the statement waits for the object, the row may be fired; then it does not match any more."""
    values = settled(State.CANCELLED, Cause.HAND, param("settled_at"))
    pending = Timeout.objects.using(using).filter(slot=param("slot"), slot_taken=1)
    if in_time:
        pending = pending.filter(due_at__gt=DatabaseNow())
    changed = update(pending, **values, reason=param("reason"))
    model, since = locked
    return locking_update(changed, model, columns, using, since)


@compiled
def _replaced(using: str, model: type[Model]) -> Raw:
    pending = Timeout.objects.using(using).filter(slot=param("slot"), slot_taken=1)
    changed = update(pending, **{name: param(name) for name in REPLACED})
    return locking_update(changed, model, _READ_BACK, using)


def cancel_rows(
    rows: Sequence[Timeout],
    using: str,
    reason: str,
    now: datetime,
    *,
    cause: Timeout.Cause = Cause.HAND,
    states: Sequence[Timeout.State] = (*WAITING, State.DEAD),
) -> None:
    """Cancel the locked `rows`, which are in one of `states`, and write their histories."""
    leave(rows, using)
    for row in rows:
        events.cancel(row, now, cause, reason)
    update_each(rows, using, states)
    remove_entries(rows, using)


def revive(rows: Sequence[Timeout], using: str, now: datetime, **event: Any) -> None:
    """Make the dead, locked `rows`, whose slots are free, pending and due now, without attempts."""
    leave(rows, using)
    for row in rows:
        events.retry(row, now, **event)
    update_each(rows, using, (State.DEAD,))
    push_rows(rows, using)


def write_histories(rows: Sequence[Timeout], using: str) -> None:
    """Write the histories of the locked `rows`, in whatever state they are."""
    update_each(rows, using, tuple(State))


def renew_keys(rows: Sequence[Timeout], using: str) -> None:
    """Give the locked `rows`, which may be attempted again, new idempotency keys, and write their histories."""
    for row in rows:
        row.idempotency_key = new_idempotency_key()
    update_each(rows, using, (*WAITING, State.FIRING, State.DEAD))


def erase(rows: Sequence[Timeout], using: str, event: Mapping[str, Any]) -> None:
    """Empty what the settled, locked `rows` have of a person, and note the `event`."""
    for row in rows:
        events.erase(row, **event)
    update_each(rows, using, [state for state in State if state.is_settled])


def forbid_attempts(rows: Sequence[Timeout], using: str, reason: str, now: datetime, by: str = "hand") -> None:
    """Give those of the locked `rows` that are firing no further attempt if this one fails."""
    firing = [row for row in rows if row.state == State.FIRING]
    for row in firing:
        events.forbid_attempts(row, now, by, reason)
    update_each(firing, using, (State.FIRING,))


def count_as_condition(rows: Sequence[Timeout], using: str) -> None:
    """Count rounds that a guard has cancelled as cancelled by their condition, so that they may be armed again."""
    for row in rows:
        row.cause, row.is_guarded = Cause.CONDITION, True
    update_each(rows, using, (State.CANCELLED,))
