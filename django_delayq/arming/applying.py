"""Write what `reconcile` has found: insert, move, recompute and cancel rows, stop clocks and let them run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from django.db import transaction

from django_delayq.arming import holding
from django_delayq.arming.changes import Changes, Round
from django_delayq.arming.holding import Facts
from django_delayq.backoff import LogInterval
from django_delayq.ledger import paging, writing
from django_delayq.ledger.locking import lock_in_slot_order
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.paging import update_each
from django_delayq.ledger.planned import begin, planning_policy
from django_delayq.ledger.shares import set_shares
from django_delayq.ledger.subjects import slots_of, subject_at
from django_delayq.ledger.traces import current_trace
from django_delayq.ledger.writing import resume_rows
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.rounds import events
from django_delayq.rounds.memory import SINCE_CHANGED
from django_delayq.signals import (
    timeout_cancelled,
    timeout_held,
    timeout_rearmed,
    timeout_rescheduled,
    timeout_resumed,
    timeout_scheduled,
)
from django_delayq.sql.statements import chunks
from django_delayq.times import clock

if TYPE_CHECKING:
    from django_delayq.arming.row_state import RowState

logger = logging.getLogger("django_delayq.arming")
State = Timeout.State
_rearmed_interval = LogInterval()
"""A shop whose payments are often refused after a guard would otherwise fill its log with these lines."""


def apply(changes: Changes, using: str, *, signals: bool) -> None:
    """Write `changes`. On commit, update Redis and, with `signals`, send the signals."""
    rows = Timeout.objects.using(using)
    cancelled = list[Timeout]()
    armed, ran = _insert(changes.insert, using, alone=signals)
    moved = _restart(changes.move, using) + _recompute(changes.recompute, using)
    held, resumed = _set_clocks(changes, ran, using)
    if changes.cancel:
        _cancel(changes.cancel, using)
        if signals and timeout_cancelled.receivers:  # not has_listeners(), which ignores those of one sender
            cancelled = list(rows.filter(pk__in=list(changes.cancel), state=Timeout.State.CANCELLED))
    if signals:
        sent = ((timeout_scheduled, armed), (timeout_rescheduled, moved), (timeout_cancelled, cancelled))
        for signal, changed in (*sent, (timeout_held, held), (timeout_resumed, resumed)):
            for row in changed:
                announce(signal, row, using)


def _insert(rounds: Sequence[Round], using: str, *, alone: bool) -> tuple[list[Timeout], list[Timeout]]:
    """Insert these rounds; return the rows of some, and of those the rows whose clock must be stopped.

    Those that continue a former round are inserted as rows of their own: they are few. The others in bulk, unless
    `alone`.
    """
    single = [each for each in rounds if alone or each.kept or each.rest is not None]
    rows = [_new_row(each, using) for each in single]
    writing.insert(rows, using)
    for row, each in zip(rows, single, strict=True):
        if each.kept is not None and each.kept.is_guarded:
            announce(timeout_rearmed, row, using)
            transaction.on_commit(partial(_warn_of_rearmed, row), using=using, robust=True)
    plain = [] if alone else [each for each in rounds if not each.kept and each.rest is None]
    for policy in dict.fromkeys(each.state.policy for each in plain):
        found = {each.state.pk: each for each in plain if each.state.policy is policy}
        slots = slots_of(policy, found, "", using)
        given = [(slot, text, found[pk].since_at, found[pk].due_at, found[pk].terms) for pk, text, slot in slots]
        paging.insert_rounds(policy, given, using)
    return rows, [row for row, each in zip(rows, single, strict=True) if each.state.on_hold and each.rest is None]


def _warn_of_rearmed(row: Timeout) -> None:
    """Warn, once a minute for each policy, that a round has begun again which a guard had ended."""
    if _rearmed_interval.is_over(row.policy):
        logger.warning(
            "Timeout %s (%s, object %s) is scheduled although before_deadline() had ended its round: the condition "
            "holds again. If a save of an old instance has overwritten a payment, see the page on races",
            *(row.pk, row.policy, row.object_id),
            extra={"event": "timeout_rearmed", "timeout_id": row.pk, "policy": row.policy, "object_id": row.object_id},
        )


def _restart(rounds: dict[int, Round], using: str) -> list[Timeout]:
    """Begin new rounds in waiting rows; return the rows. Their clocks run, also of those that were held."""
    facts = Facts(_locked(Timeout.objects.using(using).filter(slot_taken=1), list(rounds), using), using)
    begun, trace = [(row, rounds[row.pk]) for row in facts.rows], current_trace()
    for row, each in begun:
        events.restart(row, each.since_at, each.due_at, each.terms, trace)
        if policy := planning_policy(row):
            begin(row, policy, each.due_at, clock.now(), facts.needed(row, policy))
    set_shares(facts.rows, using)
    moves = [(row, each.due_at, None) for row, each in begun]
    moved = writing.move_rows(moves, facts, what="rescheduled", at=clock.now(), by="save", reason=SINCE_CHANGED)
    for row, each in begun:
        if each.rest is not None:
            events.hold(row, each.rest, clock.now(), since=each.held_at, by="save")
    writing.write_waiting([row for row in moved if row.state == State.HELD], using)
    return moved


def _recompute(rounds: dict[int, Round], using: str) -> list[Timeout]:
    """Give waiting rows whose data has changed their new deadlines; return the rows.

    What has stopped their clocks in this round moves the new deadlines, too.
    """
    rows, plans = Timeout.objects.using(using).filter(slot_taken=1, terms__isnull=False), []
    facts = Facts(_locked(rows, list(rounds), using), using)
    for row in facts.rows:
        each = rounds[row.pk]
        time = each.state.policy.own_time(each.data, each.state.after)
        plans.append((row, events.plan_of(row, each.due_at, each.terms, time, facts)))
    return writing.write_plans(plans, facts, what="recomputed", at=clock.now(), by="save")


def _locked(rows: TimeoutQuerySet, ids: Sequence[int], using: str) -> list[Timeout]:
    """Lock those of `rows` that have these ids, and return them."""
    return [row for chunk in chunks(ids) for row in lock_in_slot_order(rows.filter(pk__in=chunk), using)]


def _new_row(each: Round, using: str) -> Timeout:
    subject = subject_at(each.state.policy, each.state.pk, "", using)
    # What is next of a held one follows from its deadline when its clock runs again.
    values = {} if each.rest is None else {"state": State.HELD.value}
    if each.kept is not None:
        values |= {"steps_over": each.kept.steps_over, "stops": each.kept.stops}
    row = writing.new_row(subject, each.due_at, each.since_at, terms=each.terms, obj=each.obj, **values)
    if each.kept is not None:
        events.continue_round(row, each.kept, is_held=each.rest is not None)
    if each.rest is not None:
        events.hold(row, each.rest, row.created_at, since=each.held_at, by="save")
    return row


def _set_clocks(changes: Changes, ran: Sequence[Timeout], using: str) -> tuple[list[Timeout], list[Timeout]]:
    """Stop clocks, also of the rows `ran`, and let others run; return the rows of both.

    A hold by hand that has reached its end ends first. Of one that lasts, note whether the condition holds beside it.
    """
    if not (changes.hold or changes.resume or ran):
        return [], []
    locked = _locked(Timeout.objects.using(using).filter(slot_taken=1), [*changes.hold, *changes.resume], using)
    facts = Facts([*locked, *ran], using)
    ended = holding.end_passed(locked, facts)
    if noted := [row for row in locked if row.held_by_hand]:
        for row in noted:
            events.note_hold_when(row, holds=row.pk in changes.hold)
        update_each(noted, using, (State.HELD,))
    running = [*ran, *(row for row in locked if row.pk in changes.hold and row.state == State.PENDING)]
    stopped = [row for row in locked if row.pk in changes.resume and row.state == State.HELD and not row.held_by_hand]
    resumed = [*ended, *resume_rows([(row, facts.now) for row in stopped], facts, by="save")]
    return holding.hold(running, facts, by="save"), resumed


def _cancel(cancel: dict[int, tuple[RowState, Timeout.Cause]], using: str) -> None:
    for cause in sorted({cause for _, cause in cancel.values()}):
        # A row with a former queue or label of its policy keeps its entry, which a worker checks unnecessarily.
        found = {row_id: state.policy for row_id, (state, its_cause) in cancel.items() if its_cause == cause}
        lines = {row_id: (policy.queue, policy.label) for row_id, policy in found.items()}
        for ids in chunks(list(lines)):
            if len(ids) > 1:  # in the order of their slots, as everywhere
                lock_in_slot_order(Timeout.objects.using(using).filter(pk__in=ids, slot_taken=1), using)
            writing.cancel_ids({row_id: lines[row_id] for row_id in ids}, using, cause)
