"""Arm, move and cancel timeouts so that the ledger fits the rows as they are now in the database.

Level-triggered: the current state of a row decides, not what a save changed. So the next save, or `sync`, makes up for
a save that was missed.

| the row | the ledger has | change |
| --- | --- | --- |
| `when` holds, `since` is set | no pending round, and the round is open and not too old | arm; see `_kept_rounds` |
| `when` holds, `since` is set | a pending round of the same `since` | none: its deadline may have been set by hand |
| `when` holds, `since` is set | a pending round of another `since` | move it; cancel it if the new round is closed |
| `when` does not hold, or `since` is empty | a pending round | cancel it; the round stays open |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections
from django.db.models import F, Q

from django_delayq import clock
from django_delayq.arming.row_state import (
    CLOSING,
    RowState,
    ledger_fits,
    objects_of_policy,
    of_since,
    row_state,
    row_states,
)
from django_delayq.conf import get_settings
from django_delayq.key_types import object_id_of
from django_delayq.ledger import paging, writing
from django_delayq.ledger.locking import (
    as_it_is,
    lock_in_slot_order,
    lock_row,
    locking_rows,
    transaction_of,
)
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.paging import chunks
from django_delayq.ledger.statements import compiled, padded, params
from django_delayq.ledger.subjects import kind_of, slots_of, subject_at
from django_delayq.models import Timeout
from django_delayq.signals import timeout_cancelled, timeout_rescheduled, timeout_scheduled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from datetime import datetime, timedelta

    from django.db.models import Model, QuerySet

    from django_delayq.policies import TimeoutPolicy

Cause = Timeout.Cause


class Kept(NamedTuple):
    """What a round keeps when it is armed again. `due_at` is None if its policy decides the deadline."""

    due_at: datetime | None
    first_due_at: datetime
    extensions: int

    def is_later(self, due_at: datetime) -> bool:
        """Return whether the round keeps more than `due_at`, which its policy would give it now.

        A deadline that was not moved is kept only if it is later: the caller that scheduled it by hand has granted it.
        """
        is_moved = self.due_at != self.first_due_at or self.extensions > 0
        return is_moved or self.first_due_at > due_at


class Arm(NamedTuple):
    """A round that must be armed."""

    policy: TimeoutPolicy[Any]
    pk: Any
    since_at: datetime | None
    due_at: datetime
    kept: Kept | None


@dataclass(slots=True)
class Changes:
    """What must be written so that the ledger fits some rows of one model."""

    insert: list[Arm] = field(default_factory=list)
    move: dict[int, tuple[datetime, datetime]] = field(default_factory=dict)
    """For each id the new `since_at` and deadline."""
    cancel: dict[int, tuple[Timeout.Cause, str]] = field(default_factory=dict)
    """For each id the cause and the queue of the policy."""
    too_old: int = 0
    pks: list[Any] = field(default_factory=list)
    """The keys of the objects of these changes."""

    @property
    def size(self) -> int:
        """Return how many rows change."""
        return len(self.insert) + len(self.move) + len(self.cancel)


def arm_one(
    model: type[Model],
    policies: Sequence[TimeoutPolicy[Any]],
    pk: Any,
    using: str,
    oldest: timedelta,
    *,
    is_new: bool = False,
) -> None:
    """Make the ledger fit the row `pk`. If anything changes, the row stays locked until the transaction ends.

    Joins the caller's transaction or opens one. `oldest`: a round overdue by this or more is not armed. `is_new`: the
    row was inserted just now, so that it most likely lacks a round.
    """
    connection = connections[using]
    is_committed = not connection.in_atomic_block
    # Mostly nothing must change after a save outside a transaction, which one query shows without a lock: a transaction
    # that changes the row at the same time arms it itself.
    if is_committed and not is_new:
        if ledger_fits(model, policies, pk, using):
            return
        if not diff(row_state(model, policies, pk, using, lock=False), using, oldest).size:
            return
    # Such a save has released the row. A query that waits for the lock shows the row as it is afterwards, but the
    # ledger as it was before, and a round closed in between would be armed again.
    must_lock_first = is_committed and connection.features.has_select_for_update
    with transaction_of(using):
        if must_lock_first:
            lock_row(model, pk, using)
        states = row_state(model, policies, pk, using, lock=not must_lock_first)
        changes = diff(states, using, oldest, kept_rounds=KeptRounds(() if is_new else states, using))
        apply(changes, using, signals=True)


def arm_many(
    model: type[Model],
    policies: Sequence[TimeoutPolicy[Any]],
    pks: Collection[Any],
    using: str,
    oldest: timedelta | None,
    *,
    signals: bool = False,
) -> Changes:
    """Make the ledger fit the rows `pks` in one transaction; return what was written.

    `oldest=None`: arm rounds of any age. `signals`: for few rows.
    """
    with transaction_of(using):
        list(locking_rows(model, pks, using).values_list("pk", flat=True))
        changes = changes_of(model, policies, pks, using, oldest)
        apply(changes, using, signals=signals)
    return changes


def changes_of(
    model: type[Model],
    policies: Sequence[TimeoutPolicy[Any]],
    pks: Collection[Any],
    using: str,
    oldest: timedelta | None,
) -> Changes:
    """Return what `arm_many` would write; a hint unless the rows are locked."""
    return diff(row_states(model, policies, pks, using), using, oldest)


def diff(
    states: Sequence[RowState],
    using: str,
    oldest: timedelta | None,
    objects: dict[Any, Any] | None = None,
    *,
    kept_rounds: KeptRounds | None = None,
) -> Changes:
    """Return the changes that the table above requires for `states`.

    `objects`: those of `states` by key, if the caller has read them, and all states are of one policy. `kept_rounds`:
    those of more states, if the caller proceeds state by state.
    """
    changes = Changes()
    kept_rounds = kept_rounds or KeptRounds(states, using)
    read: dict[type[Model], dict[Any, Any]] = {}

    def object_of(state: RowState) -> Any:
        if objects is not None:
            return objects.get(state.pk)
        model = state.policy.model
        if model not in read:
            pks = {each.pk for each in states if each.holds and each.policy.model is model}
            read[model] = objects_of_policy(state.policy, pks, using)
        return read[model].get(state.pk)  # None: deleted since `states` were read without a lock

    for state in states:
        policy, since_at, before = state.policy, state.since_at, changes.size
        if state.holds:
            if callable(policy.since) and state.closed is None:  # of one row, by `row_state`
                obj = object_of(state)
                since_at = None if obj is None else policy.since_of(obj)
            if state.pending_id is None or state.pending_since != since_at:
                _diff_round(changes, state, since_at, object_of, kept_rounds, using=using, oldest=oldest)
        elif state.pending_id is not None:
            changes.cancel[state.pending_id] = (Cause.CONDITION, policy.queue)
        if changes.size > before:
            changes.pks.append(state.pk)
    return changes


def _diff_round(
    changes: Changes,
    state: RowState,
    since_at: datetime | None,
    object_of: Callable[[RowState], Any],
    kept_rounds: KeptRounds,
    *,
    using: str,
    oldest: timedelta | None,
) -> None:
    """Arm the round of `since_at`, or move the pending round to it; note in `changes` what must be written."""
    policy, pending_id = state.policy, state.pending_id

    def is_closed() -> bool:
        return state.closed if state.closed is not None else _is_closed(state, since_at, using)

    if pending_id is None and (since_at is None or is_closed()):
        return
    obj = object_of(state) if callable(policy.after) and since_at is not None else None
    is_gone = obj is None and callable(policy.after)
    due_at = None if is_gone else policy.due_of(obj, since_at, state.after)
    kept = None if pending_id is not None or due_at is None else kept_rounds.of(state, since_at)
    kept = kept if kept is not None and due_at is not None and kept.is_later(due_at) else None
    due_at = due_at if kept is None else kept.due_at or due_at
    # A sync leaves more of the old rounds alone than a save, but not pending ones.
    limit = oldest if oldest is None or pending_id is None else max(oldest, get_settings().catch_up)
    is_too_old = due_at is not None and limit is not None and clock.now() - due_at >= limit
    if pending_id is None:
        if is_too_old:
            changes.too_old += 1
        elif due_at is not None:
            changes.insert.append(Arm(policy, state.pk, since_at, due_at, kept))
    elif since_at is None or due_at is None:
        changes.cancel[pending_id] = (Cause.CONDITION, policy.queue)
    elif is_closed():
        changes.cancel[pending_id] = (Cause.SUPERSEDED, policy.queue)
    elif is_too_old:
        changes.cancel[pending_id] = (Cause.LATE, policy.queue)
    else:
        changes.move[pending_id] = (since_at, due_at)


class KeptRounds:
    """Reads at the first question what the rounds of `states` keep. Those of new objects keep nothing."""

    def __init__(self, states: Collection[RowState], using: str) -> None:
        self._unarmed = [each for each in states if each.holds and each.pending_id is None]
        self._using = using
        self._since: set[datetime | None] = set()
        self._kept: dict[tuple[str, datetime | None], Kept] = {}

    def of(self, state: RowState, since_at: datetime | None) -> Kept | None:
        """Return what the round of `since_at` keeps; None: nothing."""
        if since_at not in self._since:  # again for a callable of one row, of which `state` does not have the value
            self._since |= {since_at, *(each.since_at for each in self._unarmed)}
            self._kept = _kept_rounds(self._unarmed, self._since, self._using)
        slots = subject_at(state.policy, state.pk, "", self._using).slots if self._kept else ()
        return next((self._kept[slot, since_at] for slot in slots if (slot, since_at) in self._kept), None)


def _kept_rounds(
    states: Sequence[RowState], since: Collection[datetime | None], using: str
) -> dict[tuple[str, datetime | None], Kept]:
    """Return, by slot and `since_at`, what the rounds that their condition has ended keep; unmoved ones of `since`.

    Otherwise an order whose payment was tried and failed would lose its extensions, and could be extended without a
    limit. A deadline that "fire now" has set is not kept: that request has been answered.
    """
    pks: dict[TimeoutPolicy[Any], list[Any]] = {}
    for state in states:
        pks.setdefault(state.policy, []).append(state.pk)
    named = ((policy, label, found) for policy, found in pks.items() for label in policy.labels)
    slots = [slot for policy, label, found in named for _, _, slot in slots_of(policy, label, found, "", using)]
    ended = Timeout.objects.using(using).filter(slot__in=slots, cause=Cause.CONDITION)
    # An object may have very many rounds, of which few were moved.
    wanted = ~Q(due_at=F("first_due_at"), extensions=0) | of_since(since)
    rows = as_it_is(ended.filter(wanted), using).order_by("id")
    kept = {}
    for row in rows.only("slot", "since_at", "due_at", "first_due_at", "extensions", "history"):
        moves = [event["what"] for event in row.history if "from" in event]
        due_at = None if moves[-1:] == ["fire_requested"] else row.due_at
        kept[row.slot, row.since_at] = Kept(due_at, row.first_due_at, row.extensions)
    return kept


def _is_closed(state: RowState, since_at: datetime | None, using: str) -> bool:
    rounds = subject_at(state.policy, state.pk, "", using).rounds().filter(CLOSING, since_at=since_at)
    return bool(as_it_is(rounds, using).values_list("pk")[:1])


def apply(changes: Changes, using: str, *, signals: bool) -> None:
    """Write `changes`. On commit, update Redis and, with `signals`, send the signals."""
    rows = Timeout.objects.using(using)
    moved, cancelled = list[Timeout](), list[Timeout]()
    singly = [each for each in changes.insert if signals or each.kept]  # few
    armed = [_new_row(each, using) for each in singly]
    writing.insert(armed, using)
    if not signals:
        for policy in {each.policy for each in changes.insert}:
            of_policy = [each for each in changes.insert if each.policy is policy and not each.kept]
            rounds = {each.pk: (each.since_at, each.due_at) for each in of_policy}
            slots = slots_of(policy, policy.label, rounds, "", using)
            paging.insert_rounds(policy, [(slot, text, *rounds[pk]) for pk, text, slot in slots], using)
    if changes.move:
        moved = lock_in_slot_order(rows.filter(pk__in=list(changes.move), slot_taken=1), using)
        writing.restart_rows([(row, *changes.move[row.pk]) for row in moved], using)
    if changes.cancel:
        _cancel(changes.cancel, using)
        if signals and timeout_cancelled.receivers:  # not has_listeners(), which ignores those of one sender
            ids = padded(changes.cancel)
            cancelled = _cancelled.objects(using, len(ids), id=ids)
    if signals:
        sent = ((timeout_scheduled, armed), (timeout_rescheduled, moved), (timeout_cancelled, cancelled))
        for signal, changed in sent:
            for row in changed:
                announce(signal, row, using)


def _new_row(arm: Arm, using: str) -> Timeout:
    row = writing.new_row(subject_at(arm.policy, arm.pk, "", using), arm.due_at, arm.since_at)
    if arm.kept is not None:
        row.first_due_at, row.extensions = arm.kept.first_due_at, arm.kept.extensions
    return row


@compiled
def _cancelled(using: str, ids: int) -> QuerySet[Timeout, Any]:
    return Timeout.objects.using(using).filter(pk__in=params("id", ids), state=Timeout.State.CANCELLED)


def _cancel(cancel: dict[int, tuple[Timeout.Cause, str]], using: str) -> None:
    for cause in sorted({cause for cause, _ in cancel.values()}):
        # A row whose queue is not the current one of its policy keeps its entry, which a worker checks unnecessarily.
        for chunk in chunks([(row_id, queue) for row_id, (its_cause, queue) in cancel.items() if its_cause == cause]):
            entries = dict(chunk)
            if len(entries) > 1:  # in the order of their slots, as everywhere
                lock_in_slot_order(Timeout.objects.using(using).filter(pk__in=list(entries), slot_taken=1), using)
            writing.cancel_ids(entries, using, cause)


class Gone(NamedTuple):
    """How many timeouts of deleted rows were cancelled, and the keys of the rows that are not deleted."""

    cancelled: int
    left: set[Any]


def cancel_of_deleted(model: type[Model], pks: Collection[Any], using: str) -> Gone:
    """Cancel the pending timeouts, of every policy and key, of those rows `pks` of `model` that are deleted.

    Sends no signals, as there may be very many.
    """
    kind = kind_of(model, using)
    cancelled, left = 0, set[Any]()
    with transaction_of(using):
        for chunk in chunks(sorted(pks, key=str)):
            there = model._base_manager.using(using).filter(pk__in=chunk).values_list("pk", flat=True)
            ids = {object_id_of(model, pk) for pk in there}
            left |= {pk for pk in chunk if object_id_of(model, pk) in ids}
            gone = {object_id_of(model, pk) for pk in chunk} - ids
            rows = Timeout.objects.using(using).filter(content_type=kind, object_id__in=gone, slot_taken=1)
            found = lock_in_slot_order(rows.only("id", "queue", "slot"), using)
            cancelled += writing.cancel_ids({row.pk: row.queue for row in found}, using, Cause.GONE)
    return Gone(cancelled, left)
