"""Make the ledger fit the rows of objects as they are now in the database.

Level-triggered: the current state of a row decides, not what a save changed. So the next save, or `sync`, makes up for
a save that was missed.

| the row | the ledger has | change |
| --- | --- | --- |
| `when` holds, `since` is set | no pending round, and the round is open and not too old | arm; see `settled` |
| `when` holds, `since` is set | a pending round of the same `since` | none if it was set by hand |
| also its data has changed | a computed round of the same `since` | compute it; cancel it if too old or exempt |
| also `hold_when` holds | a round whose clock runs | stop it; a round that is armed or moved is held, too |
| `hold_when` does not hold | a round that is held, but not by hand | let its clock run |
| `when` holds, `since` is set | a pending round of another `since` | move it; cancel it if closed, too old or exempt |
| `when` does not hold, or `since` is empty | a pending round | cancel it; the round stays open |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Case, Exists, F, Model, OuterRef, Q, When

from django_delayq.arming.applying import apply
from django_delayq.arming.changes import Arming, Changes, Round, RoundKey, is_of_one_object, terms_now
from django_delayq.arming.row_state import (
    CLOSING,
    RowState,
    keyed_rounds,
    ledger_fits,
    objects_of_policy,
    of_since,
    present_data,
    row_state,
    row_states,
    slots_by_object,
)
from django_delayq.conf import get_settings
from django_delayq.ledger.controls import holds_ended
from django_delayq.ledger.locking import lock_keys, lock_row, read_committed, transaction_of
from django_delayq.ledger.planned import acts_at
from django_delayq.models import Installation, Timeout
from django_delayq.policy.terms import changed, has_column, has_since_path, reads_again, terms_of_code, values_in
from django_delayq.rounds.events import KEPT_COLUMNS, RoundMemory
from django_delayq.rounds.memory import stops_of, with_stop
from django_delayq.sql.now import database_now
from django_delayq.times import clock
from django_delayq.times.paths import read_relations

if TYPE_CHECKING:
    from django_delayq.policy.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause


_handled: ContextVar[frozenset[TimeoutPolicy[Any]]] = ContextVar("delayq_handled", default=frozenset())


@contextmanager
def by_handler_of(policy: TimeoutPolicy[Any]) -> Iterator[None]:
    """Let what is armed in the block be armed by the handler of `policy`, whose deadlines may then be of any age.

    A chain, whose handler sets the `since` of the next round, would otherwise end after a pause that is longer than
    `CATCH_UP`. A context variable, so that it also applies to the threads and coroutines of async handlers.
    """
    token = _handled.set(_handled.get() | {policy})
    try:
        yield
    finally:
        _handled.reset(token)


def arm_one(policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str, *, is_new: bool = False) -> None:
    """Make the ledger fit the row `pk`. If anything changes, the row stays locked until the transaction ends.

    Joins the caller's transaction or opens one. `is_new`: the row was inserted just now, so that it most likely lacks a
    round.
    """
    connection, oldest = connections[using], get_settings().catch_up
    is_committed = not connection.in_atomic_block
    # Mostly nothing must change after a save outside a transaction, which one query shows without a lock: a transaction
    # that changes the row at the same time arms it itself. A second one is for what the first does not compare:
    # functions of the policy, exempt objects, and rounds that are too old.
    if is_committed and not is_new:
        if ledger_fits(policies, pk, using):
            return
        if not diff(row_state(policies, pk, using, lock=False), Arming(using, oldest)).pks:
            return
    # The row is free again, as after each save outside a transaction. A query that waits for its lock would show the
    # row as it is afterwards, but the ledger as it was before, and arm a round that was closed in between.
    must_lock_first = is_committed and connection.features.has_select_for_update
    with transaction_of(using):
        if must_lock_first:
            lock_row(policies[0].concrete_model, pk, using)
        states = row_state(policies, pk, using, lock=not must_lock_first)
        apply(diff(states, Arming(using, oldest, is_new=is_new)), using, signals=True)


def arm_many(policies: Sequence[TimeoutPolicy[Any]], pks: Collection[Any], how: Arming) -> Changes:
    """Make the ledger fit the rows `pks` in one transaction; return what was written, or with `dry_run` would be."""
    if how.dry_run:
        return diff(row_states(policies, pks, how.using), how)
    with transaction_of(how.using):
        locked = lock_keys(policies[0].concrete_model, pks, how.using, wait=how.wait)
        if how.failures is not None:
            how.failures.locked += len(pks) - len(locked)
        changes = diff(row_states(policies, locked, how.using), how)
        apply(changes, how.using, signals=False)
    return changes


def arm_outdated(policy: TimeoutPolicy[Any], rows: Iterable[tuple[Any, Timeout]], using: str) -> list[int]:
    """Compute again the deadlines of waiting, locked `rows` whose data has changed; return the ids of these rows.

    `rows`: each with the key of its object, which is locked, too. The value may have been changed past Django, or the
    sync has not come to its very many deadlines yet. A firing and the strict guard ask, so that they read the same.
    """
    may_follow = not policy.has_plain_since
    waiting = {pk: row for pk, row in rows if row.is_waiting and (row.terms or may_follow) and not row.key}
    if not waiting or not reads_again(policy):
        return []
    present, reads_since = present_data(policy, waiting, using), has_since_path(policy)
    outdated = [pk for pk, (since_at, _) in present.items() if reads_since and since_at != waiting[pk].since_at]
    if has_column(policy):
        outdated += [pk for pk, (_, terms) in present.items() if changed(policy, waiting[pk].terms, terms)]
    if outdated:
        arm_many([policy], outdated, Arming(using, get_settings().catch_up))
    return [waiting[pk].pk for pk in set(outdated)]


def arm_readable(policy: TimeoutPolicy[Any], pks: Sequence[Any], how: Arming) -> Changes:
    """Do as `arm_many`, and count the objects that cannot be read among its `failures`: one by one, if some cannot."""
    try:
        return arm_many([policy], pks, how)
    except Exception as error:
        if how.failures is None or not is_of_one_object(error):
            raise
    changes = Changes()
    for pk in pks:
        with how.failures.counting(pk):
            changes.add(arm_many([policy], [pk], how))
    return changes


def diff(states: Sequence[RowState], how: Arming, objects: dict[type[Model], dict[Any, Any]] | None = None) -> Changes:
    """Return the changes that the table above requires for `states`. A hint unless their rows are locked.

    Args:
        states: of rows of one table.
        how: see `Arming`.
        objects: by model and key, those that the caller has read. Others are read if a callable needs them.
    """
    return _Comparison(states, how, objects or {}).compared()


@dataclass
class _Comparison:
    """The rows of one table beside their rounds in the ledger. The fields are those of `diff`, and what it finds."""

    states: Sequence[RowState]
    how: Arming
    objects: dict[type[Model], dict[Any, Any]]
    changes: Changes = field(default_factory=Changes)
    unfit: list[tuple[RowState, datetime | None]] = field(default_factory=list)
    """The rows of which no round is pending, or one of another `since`, each with its `since` now."""

    def compared(self) -> Changes:
        """Add to `changes` what each row requires, and return them."""
        for state in self.states:
            if state.holds:
                with self._counting(state):
                    self._compare(state)
            elif state.pending_id is not None:
                self.changes.cancel[state.pending_id] = (state, Cause.CONDITION)
        for state, since_at in self.unfit:
            place = (state.policy.label, state.pk, since_at)
            is_closed = place in self.settled[0] if state.closed is None else state.closed
            if state.pending_id is not None or not is_closed:
                with self._counting(state):
                    self._diff_round(state, since_at, is_closed=is_closed)
        self._diff_keyed()
        return self.changes

    def _counting(self, state: RowState) -> AbstractContextManager[None]:
        return self.how.failures.counting(state.pk) if self.how.failures else nullcontext()

    def _compare(self, state: RowState) -> None:
        """Compare a row that matches with its pending round."""
        since_at = state.since_at
        if callable(state.policy.since):
            obj = self._object_of(state)
            since_at = None if obj is None else state.policy.since_of(obj)
        if state.pending_id is None or state.pending_since != since_at:
            self.unfit.append((state, since_at))
            return
        self._diff_terms(state, state.pending_id, since_at)
        if state.policy.hold_when is not None and state.pending_id not in self.changes.cancel:
            self.changes.set_clock(state, state.pending_id, state.held)

    def _diff_terms(self, state: RowState, pending_id: int, since_at: datetime | None) -> None:
        """Add the deadline of a pending round if it was computed, and its data has changed since then."""
        if since_at is None or not self._is_outdated(state, since_at):
            return
        data = self._data_of(state)
        due_at = None if data is None else state.policy.due_of(data, since_at, state.after)
        if due_at is None:
            self.changes.cancel[pending_id] = (state, Cause.CONDITION)
        elif self._is_too_old(state, due_at, has_row=True):
            self.changes.cancel[pending_id] = (state, Cause.LATE)
        else:
            self.changes.recompute[pending_id] = Round(state, since_at, due_at, None, None, data)

    def _is_outdated(self, state: RowState, since_at: datetime) -> bool:
        """Return whether the data of the computed deadline of the pending round has changed."""
        terms = state.terms
        if not has_column(state.policy):
            if not changed(state.policy, state.pending_terms, None):
                return False
            obj = self._object_of(state)
            terms = None if obj is None else terms_of_code(state.policy, obj, since_at)
        return changed(state.policy, state.pending_terms, terms)

    def _data_of(self, state: RowState) -> Any:
        """Return what the deadline of `state` is computed of: the values that SQL has read, or else its object."""
        values = values_in(state.terms, state.policy)
        return self._object_of(state) if values is None else values

    def _diff_keyed(self) -> None:
        """Add the clocks of rounds with a key that must be stopped, or must run.

        One query for each policy that has `hold_when`. Arming does not change such rounds otherwise.
        """
        for policy in {state.policy for state in self.states if state.on_hold is not None}:
            by_pk = {state.pk: state for state in self.states if state.policy is policy}
            for pk, row_id, held in keyed_rounds(policy, by_pk, self.how.using):
                self.changes.set_clock(by_pk[pk], row_id, held)

    def _object_of(self, state: RowState) -> Any:
        """Return the object of `state`; None: it was deleted since the states were read without a lock.

        Read all objects of the states, by the first call; if one of them cannot be read, only its own.
        """
        model, read = state.policy.model, self.objects
        if model not in read:
            pks = {each.pk for each in self.states if each.holds and each.policy.model is model}
            try:
                found = objects_of_policy(state.policy, pks, self.how.using)
                read_relations(list(found.values()), {name for each in self.states for name in each.policy.followed})
            except Exception as error:
                if not is_of_one_object(error):
                    raise
                return objects_of_policy(state.policy, [state.pk], self.how.using).get(state.pk)
            read[model] = found
        return read[model].get(state.pk)

    def _diff_round(self, state: RowState, since_at: datetime | None, *, is_closed: bool) -> None:
        """Add what makes the ledger fit `state`: no round is pending, or one of another value than `since_at`.

        Only a round to be inserted keeps any of what `settled` has of it.
        """
        policy, pending_id, changes = state.policy, state.pending_id, self.changes
        needs_data = policy.needs_object and since_at is not None
        obj = self._data_of(state) if needs_data else None
        due_at = None if needs_data and obj is None else policy.due_of(obj, since_at, state.after)
        if since_at is None or due_at is None:
            if pending_id is not None:
                changes.cancel[pending_id] = (state, Cause.CONDITION)
            return
        kept = self.settled[1].get((policy.label, state.pk, since_at)) if pending_id is None else None
        if kept is not None:
            terms, moved = terms_now(state, since_at, obj), kept.due_at
            if moved is None or changed(policy, kept.terms, terms):
                moved = policy.own_time(obj, state.after).after_stops(due_at, stops_of(kept.stops))
                kept = kept._replace(due_at=moved, asked_due_at=due_at, computed_due_at=due_at)
                kept = kept._replace(first_due_at=max(kept.first_due_at, due_at), terms=terms)
            due_at = moved
        continues = kept is not None and kept.stopped_at is not None  # however long ago it was held
        due_at, kept, rest = self._with_clock(state, since_at, due_at, kept)
        until = max(due_at, (kept and kept.waits_until) or due_at)  # a snooze may be longer than what is too old
        is_too_old = self._is_too_old(state, until, has_row=bool(pending_id or kept)) and not continues
        if pending_id is None:
            if is_too_old:
                changes.too_old += 1
            else:
                planned = self._object_of(state) if policy.plan_needs_object else None
                changes.insert.append(Round(state, since_at, due_at, kept, rest, obj, planned))
        elif is_closed:
            changes.cancel[pending_id] = (state, Cause.SUPERSEDED)
        elif is_too_old:
            changes.cancel[pending_id] = (state, Cause.LATE)
        else:
            changes.move[pending_id] = Round(state, since_at, due_at, kept, rest, obj)

    def _with_clock(
        self, state: RowState, since_at: datetime, due_at: datetime, kept: RoundMemory | None
    ) -> tuple[datetime, RoundMemory | None, timedelta | None]:
        """Return the deadline of a round that begins, or continues; what it keeps; the rest of its time if held."""
        stopped_at = None if kept is None else kept.stopped_at
        if stopped_at is None and (kept is not None or not state.on_hold):  # `apply` stops a clock that was running
            return due_at, kept, None
        time = state.policy.own_time(self._object_of(state) if state.policy.needs_object else None, state.after)
        if kept is None or stopped_at is None or (state.on_hold and kept.resumed_at is None):
            begin = stopped_at or min(since_at, clock.now())
            return due_at, kept, max(time.elapsed(begin, due_at), timedelta(0))
        end = kept.resumed_at or kept.restarted_at or clock.now()
        waits = kept.waits_until and time.after_stop(kept.waits_until, stopped_at, end)
        kept = kept._replace(stopped_at=None, restarted_at=end, waits_until=waits)
        kept = kept._replace(stops=with_stop(kept.stops, stopped_at, end))
        return time.after_stop(due_at, stopped_at, end), kept, None

    def _is_too_old(self, state: RowState, due_at: datetime, *, has_row: bool) -> bool:
        """Return whether a round with this deadline is overdue by too much to be armed. Its grace counts: `acts_at`.

        A sync leaves more of the old rounds alone than a save, but not those that have a row: they are pending, or
        their condition had ended them, and holds again.
        """
        policy, oldest = state.policy, self.how.oldest
        if oldest is None or policy in _handled.get():
            return False
        if policy.grace is not None:
            due_at = acts_at(policy, due_at, self._object_of(state) if policy.plan_needs_object else None)
        return clock.now() - due_at >= (max(oldest, get_settings().catch_up) if has_row else oldest)

    @cached_property
    def settled(self) -> tuple[set[RoundKey], dict[RoundKey, RoundMemory]]:
        """Return which rounds of `unfit` are closed, and what those keep that their condition has ended, in one query.

        Read by the first round that needs it. None does if all objects are exempt, or their policies have no deadline.

        If they kept nothing, an order whose payment was tried and failed would lose its extensions, and could be
        extended without a limit. A deadline that "fire now" has set is not kept: that request has been answered.
        """
        closed, kept, is_new, using = set[RoundKey](), dict[RoundKey, RoundMemory](), self.how.is_new, self.how.using
        # Not those that are known to be closed, nor pending and new ones that are known to be open: these keep nothing.
        asked = [
            each
            for each in self.unfit
            if each[0].closed is None or not (each[0].closed or each[0].pending_id or is_new)
        ]
        if not asked:
            return closed, kept
        places = {(state.policy.label, state.pk) for state, _ in asked}
        slots = slots_by_object({state.policy for state, _ in asked}, {pk for _, pk in places}, using)
        # Not every object is asked about for each policy: of another round the state is not known.
        slots = {slot: place for slot, place in slots.items() if place in places}
        of_lines = of_since(since_at for _, since_at in asked) & Q(slot__in=list(slots))
        rows = read_committed(Timeout.objects.using(using).filter(of_lines), using)
        is_adopted = Exists(Installation.objects.using(using).filter(since_at__gte=OuterRef("settled_at")))
        rows = rows.annotate(own_key=Case(When(~is_adopted, then="idempotency_key")))
        columns = ("id", *KEPT_COLUMNS)
        if all(state.closed is not None for state, _ in asked):  # as after most saves; this takes Django less time
            found = rows.filter(cause=Cause.CONDITION).values_list("slot", "since_at", *columns)
        else:  # of closed rounds nothing but each place once, because there may be very many with one `since_at`
            ended = {f"ended_{name}": Case(When(cause=Cause.CONDITION, then=F(name))) for name in columns}
            rows = rows.filter(CLOSING | Q(cause=Cause.CONDITION))
            found = rows.annotate(**ended).values_list("slot", "since_at", *ended).distinct()
        for slot, since_at, *values in sorted(found, key=lambda row: row[2] or 0):
            row_id, *read = values
            place = (*slots[slot], since_at)
            if row_id is None:
                closed.add(place)
            elif not is_new:
                kept[place] = RoundMemory.of(dict(zip(KEPT_COLUMNS, read, strict=True)))
        if any(each.stopped_at for each in kept.values()):
            now = database_now(using)
            kept |= {place: each._replace(restarted_at=now) for place, each in kept.items() if each.stopped_at}
        return closed, kept and self._after_holds(kept)

    def _after_holds(self, kept: dict[RoundKey, RoundMemory]) -> dict[RoundKey, RoundMemory]:
        """Return `kept` with the deadlines moved by holds that have not moved them yet, as those of pending rounds."""
        moved, first = dict(kept), min(each.holds_counted_until for each in kept.values())
        by_place = {(state.policy.label, state.pk): state for state, _ in self.unfit}
        policies = {by_place[label, pk].policy for label, pk, _ in kept}
        held = {policy: holds_ended(policy, first, self.how.using) for policy in policies}
        for place, each in kept.items():
            label, pk, since_at = place
            state = by_place[label, pk]
            spans = [(begin, end) for begin, end in held[state.policy] if end > each.holds_counted_until]
            due_at = each.due_at
            if due_at is None or since_at is None or each.stopped_at is not None or not spans:
                continue
            obj, stops = self._object_of(state) if state.policy.needs_object else None, each.stops
            waits = each.waits_until
            time = state.policy.own_time(obj, state.after)
            for span, end in sorted(spans):
                begin = max(span, each.restarted_at or since_at)
                waits = waits and time.after_stop(waits, begin, end)
                due_at, stops = time.after_stop(due_at, begin, end), with_stop(stops, begin, end)
            moved[place] = each._replace(due_at=due_at, stops=stops, waits_until=waits)
        return moved


def oldest_in_sync(policy: TimeoutPolicy[Any], behind: timedelta = timedelta(0)) -> timedelta:
    """Return how long a round of `policy` may be overdue that the sync arms, if the pass before began `behind` ago.

    If it might be longer, the row of a round that has fired may have been pruned, and the round would fire again.
    """
    return min(2 * get_settings().sync_interval + behind, get_settings().kept_for(policy.retention) / 2)
