"""What schedulers may do with rows: insert, replace, move, cancel. Each says whether it won.

All of it runs inside a transaction that has locked the business row. Several rows are written in the order
of their slots: two bulk calls over the same rows in different orders would deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS, connections

from django_delayq import clock
from django_delayq.dialects import dialect_of
from django_delayq.ledger.columns import update_each
from django_delayq.ledger.history import RENAMED, SINCE_CHANGED, appended, clipped, event
from django_delayq.ledger.locking import as_it_is, for_update, in_state
from django_delayq.models import Timeout, new_idempotency_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    from django_delayq.ledger.subjects import Subject
    from django_delayq.models import TimeoutQuerySet

State, Cause = Timeout.State, Timeout.Cause

CHUNK = 500
# What replacing a pending row begins anew. Not `first_due_at` and `extensions`: else a caller that may extend a cart
# three times could keep it indefinitely by replacing its timeout.
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

SETTLED_FIELDS = ("state", "cause", "settled_at", "slot_taken", "reason")
MOVED_FIELDS = ("due_at", "run_at", "history", "extensions", "claims", "claimed_until")


def new_row(
    subject: Subject, due_at: datetime, since_at: datetime | None, *, payload: Any = None, reason: str = ""
) -> Timeout:
    """An unsaved pending row for `subject`."""
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
        slot=subject.slot,
    )


def insert(rows: Sequence[Timeout], using: str, *, replace: bool = False) -> None:
    """Every slot of `rows` has a pending row afterwards, and each of `rows` the id of the one in its slot.

    A slot that was taken keeps its row as it is, or with `replace` begins a new round as `rows` say. An upsert,
    because an IntegrityError would leave the caller's PostgreSQL transaction unusable.
    """
    features = connections[using].features
    for chunk in chunks(sorted(rows, key=lambda row: row.slot)):
        Timeout.objects.using(using).bulk_create(
            chunk,
            update_conflicts=True,
            update_fields=ROUND_FIELDS if replace else ("slot",),
            unique_fields=("slot", "slot_taken") if features.supports_update_conflicts_with_target else None,
        )
        if len(chunk) > 1 or chunk[0].pk is None:  # MySQL returns no ids, and nobody promises an order of them
            slots = [row.slot for row in chunk]
            taken = as_it_is(Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1), using)
            ids = dict(taken.values_list("slot", "id"))
            for row in chunk:
                row.pk = ids.get(row.slot)


def replace(row: Timeout, new: Timeout) -> Timeout:
    """`row`, which the caller has locked, begins a new round as `new` says; returns it."""
    for name in ROUND_FIELDS:
        setattr(row, name, getattr(new, name))
    _update(row, *ROUND_FIELDS)
    return row


def move(row: Timeout, due_at: datetime, *, what: str, by: str = "", reason: str = "", extended: bool = False) -> None:
    """The pending `row`, which the caller has locked, is due at `due_at`; its history tells from where it came.

    A retry or a snooze that waits for a later moment goes on waiting for it only when the deadline is extended.
    """
    row.history = appended(
        row.history, event(what, clock.now(), by=by, reason=reason, **{"from": row.due_at, "to": due_at})
    )
    row.run_at = max(row.run_at, due_at) if extended else due_at
    row.due_at = due_at
    row.extensions += extended
    row.claims, row.claimed_until = 0, None
    _update(row, *MOVED_FIELDS)


def save_moved(rows: Sequence[Timeout], using: str) -> None:
    """The pending `rows`, which the caller has locked and moved in memory, are so in the ledger."""
    update_each(rows, MOVED_FIELDS, using, (State.PENDING,))


def restart(row: Timeout, since_at: datetime, due_at: datetime) -> None:
    """The pending `row`, which the caller has locked, begins the round that counts from `since_at`."""
    row.since_at, row.first_due_at, row.attempts, row.extensions = since_at, due_at, 0, 0
    row.idempotency_key = new_idempotency_key()
    move(row, due_at, what="rescheduled", by="save", reason=SINCE_CHANGED)
    row.extensions = 0
    _update(row, "since_at", "first_due_at", "attempts", "extensions", "idempotency_key")


def cancel(ids: Iterable[int], using: str, cause: Timeout.Cause, reason: str = "") -> int:
    """Those of `ids` that were pending are cancelled; returns how many."""
    rows = Timeout.objects.using(using).filter(pk__in=list(ids), slot_taken=1)
    cancelled: int = rows.update(
        state=State.CANCELLED, cause=cause, reason=clipped(reason), settled_at=clock.now(), slot_taken=None
    )
    return cancelled


def bury(row: Timeout, reason: str) -> bool:
    """The dead `row` is cancelled by hand, so that nobody revives it."""
    now = clock.now()
    history = appended(row.history, event("dead", row.settled_at or now, reason=row.reason))
    values = {"state": State.CANCELLED, "cause": Cause.HAND, "settled_at": now}
    return bool(_still(row, State.DEAD).update(**values, reason=clipped(reason), history=history))


def cancel_rows(rows: Sequence[Timeout], using: str, reason: str, now: datetime) -> None:
    """The `rows`, which the caller has locked, pending or dead, are cancelled by hand, with their histories."""
    for row in rows:
        row.state, row.cause, row.settled_at, row.slot_taken = State.CANCELLED, Cause.HAND, now, None
        row.reason = clipped(reason)
    update_each(rows, (*SETTLED_FIELDS, "history"), using, (State.PENDING, State.DEAD))


def revive(rows: Sequence[Timeout], using: str, now: datetime) -> None:
    """The dead `rows`, which the caller has locked and whose slots are free, are pending and due now, untried."""
    for row in rows:
        row.state, row.cause, row.settled_at, row.slot_taken, row.reason = State.PENDING, "", None, 1, ""
        row.run_at, row.attempts, row.final_attempt, row.claims, row.claimed_until = now, 0, False, 0, None
    names = ("run_at", "attempts", "final_attempt", "claims", "claimed_until", "history")
    update_each(rows, (*SETTLED_FIELDS, *names), using, (State.DEAD,))


def forbid_attempts(row: Timeout, reason: str, by: str = "hand") -> bool:
    """The `row` that is firing gets no further attempt if this one fails."""
    history = appended(row.history, event("cancel_requested", clock.now(), by=by, reason=reason))
    return bool(_still(row, State.FIRING).update(final_attempt=True, history=history))


def note_condition(row: Timeout) -> None:
    """A round that was cancelled by hand counts as cancelled by its condition, so that it may be armed again."""
    _still(row, State.CANCELLED).filter(cause=Cause.HAND).update(cause=Cause.CONDITION)
    row.cause = Cause.CONDITION


def locked(rows: TimeoutQuerySet, using: str) -> list[Timeout]:
    """`rows`, waited for and locked in the order of their slots.

    A database that locks what it reads would wait for rows that are none of them. There the rows that are free are
    locked first, without waiting, and then the missing ones, one by one.
    """
    ordered = rows.order_by("slot", "id")
    if not dialect_of(connections[using]).locks_what_it_reads:
        return list(for_update(ordered, using))
    found = {row.pk: row for row in for_update(ordered, using, wait=False)}
    missing = [pk for pk in ordered.values_list("pk", flat=True) if pk not in found]
    waited_for = (for_update(rows.filter(pk=pk), using).first() for pk in missing)
    return [*found.values(), *(row for row in waited_for if row is not None)]


def lock_newest(rows: TimeoutQuerySet, using: str) -> Timeout | None:
    """The newest of `rows`, all of one subject, waited for and locked; None: there are none.

    A database that locks what it reads may read a small table backwards by the primary key, and deadlock. Asked for
    the ids alone, it reads them from the index of slots.
    """
    if dialect_of(connections[using]).locks_what_it_reads:
        ids = list(for_update(rows.order_by(), using).values_list("pk", flat=True))
        if not ids:
            return None
        rows = rows.filter(pk=max(ids))
    return for_update(rows, using).first()


def adopt(subject: Subject) -> Timeout | None:
    """The row that waits for `subject`, under the present label of its policy; inside, as the caller holds the lock.

    Without this, renaming a policy would let one object have two pending timeouts. Should there be two
    already, which old and new code armed side by side during a deployment, the one under the old name goes.
    """
    rows = locked(subject.pending(), subject.using)
    present = next((row for row in rows if row.slot == subject.slot), None)
    for row in rows:
        if row.slot == subject.slot:
            continue
        if present is not None:
            cancel([row.pk], subject.using, Cause.SUPERSEDED, RENAMED)
            continue
        row.policy, row.slot, present = subject.labels[0], subject.slot, row
        _update(row, "policy", "slot")
    return present


def chunks(rows: Sequence[Any], size: int = CHUNK) -> Iterator[Sequence[Any]]:
    """`rows` in pieces that every database takes in one statement."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _still(row: Timeout, state: Timeout.State) -> TimeoutQuerySet:
    """`row`, if it is in `state`."""
    using = row._state.db or DEFAULT_DB_ALIAS
    return in_state(Timeout.objects.using(using).filter(pk=row.pk), state, using)


def _update(row: Timeout, *names: str) -> None:
    """The named columns of the locked, pending row are as the instance has them."""
    values = {name: getattr(row, name) for name in names}
    Timeout.objects.using(row._state.db).filter(pk=row.pk, slot_taken=1).update(**values)
