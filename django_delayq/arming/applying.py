"""Write what `reconcile` has found: insert, move, recompute and cancel rows, stop clocks and let them run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import transaction

from django_delayq.arming import holding
from django_delayq.arming.changes import Changes, Round
from django_delayq.backoff import LogInterval
from django_delayq.ledger import paging, writing
from django_delayq.ledger.locking import lock_in_slot_order
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.paging import update_each
from django_delayq.ledger.subjects import slots_of, subject_at
from django_delayq.ledger.writing import hold_rows
from django_delayq.models import Timeout
from django_delayq.rounds.columns import far
from django_delayq.rounds.memory import record
from django_delayq.signals import (
    timeout_cancelled,
    timeout_held,
    timeout_rearmed,
    timeout_rescheduled,
    timeout_resumed,
    timeout_scheduled,
)
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import chunks
from django_delayq.times import clock

if TYPE_CHECKING:
    from django_delayq.arming.row_state import RowState
    from django_delayq.policy.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.arming")
State = Timeout.State
_rearmed_interval = LogInterval()
"""A shop whose payments are often refused after a guard would otherwise fill its log with these lines."""


def apply(changes: Changes, using: str, *, signals: bool) -> None:
    """Write `changes`. On commit, update Redis and, with `signals`, send the signals."""
    rows = Timeout.objects.using(using)
    moved, cancelled = list[Timeout](), list[Timeout]()
    armed, ran = _insert(changes.insert, using, alone=signals)
    if changes.move:
        moved = lock_in_slot_order(rows.filter(pk__in=list(changes.move), slot_taken=1), using)
        restarted = [(row, changes.move[row.pk]) for row in moved]
        for row, each in restarted:
            row.terms = each.terms
        writing.restart_rows([(row, each.since_at, each.due_at) for row, each in restarted], using)
        stopped = [(row, each.rest) for row, each in restarted if each.rest is not None]
        for row, _ in stopped:
            row.held_at = changes.move[row.pk].held_at
        hold_rows(stopped, using, at=clock.now(), by="save")
    moved += _recompute(changes.recompute, using)
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
    by_terms: dict[tuple[TimeoutPolicy[Any], str], dict[Any, Round]] = {}  # few: the same values, the same terms
    for each in plain:
        by_terms.setdefault((each.state.policy, each.terms), {})[each.state.pk] = each
    for (policy, terms), found in by_terms.items():
        slots = slots_of(policy, found, "", using)
        given = [(slot, text, found[pk].since_at, found[pk].due_at) for pk, text, slot in slots]
        paging.insert_rounds(policy, given, using, terms=terms)
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


def _recompute(rounds: dict[int, Round], using: str) -> list[Timeout]:
    """Give waiting rows whose data has changed their new deadlines; return the rows.

    What has stopped their clocks in this round moves the new deadlines, too.
    """
    rows, moves = Timeout.objects.using(using), []
    for ids in chunks(list(rounds)):
        for row in lock_in_slot_order(rows.filter(pk__in=ids, slot_taken=1, terms__isnull=False), using):
            each = rounds[row.pk]
            time = each.state.policy.own_time(each.data, each.state.after)
            plan = holding.plan_of(row, each.due_at, each.terms, time)
            holding.follow(row, plan)
            row.asked_due_at = None if plan.due_at == plan.computed else plan.computed
            moves.append((row, plan.due_at, writing.run_at_of(row, plan.due_at)))
    return writing.move_rows(moves, using, what="recomputed", at=clock.now(), by="save")


def _new_row(each: Round, using: str) -> Timeout:
    subject = subject_at(each.state.policy, each.state.pk, "", using)
    # What is next of a held one follows from its deadline when its clock runs again.
    values = {} if each.rest is None else {"state": State.HELD.value}
    if each.kept is not None:
        values |= {"steps_over": each.kept.steps_over, "stops": each.kept.stops}
    row = writing.new_row(subject, each.due_at, each.since_at, terms=each.terms, **values)
    if each.kept is not None:
        if each.kept.due_at is not None:
            row.terms, row.computed_due_at = each.kept.terms, each.kept.computed_due_at
        row.first_due_at, row.extensions = each.kept.first_due_at, each.kept.extensions
        row.idempotency_key = each.kept.key or row.idempotency_key
        row.restarted_at, row.payload = each.kept.restarted_at, each.kept.payload
        row.asked_due_at = None if each.kept.asked_due_at == row.due_at else each.kept.asked_due_at
        if row.step == each.kept.step or each.rest is not None:
            vars(row).update(each.kept.attempts, step=each.kept.step)
    if each.rest is not None:
        row.run_at, row.remaining, row.held_at = far(), each.rest, each.held_at
        record(row, "held", row.created_at, by="save", rest=each.rest.total_seconds())
    return row


def _set_clocks(changes: Changes, ran: Sequence[Timeout], using: str) -> tuple[list[Timeout], list[Timeout]]:
    """Stop clocks, also of the rows `ran`, and let others run; return the rows of both.

    A hold by hand that has reached its end ends first. Of one that lasts, note whether the condition holds beside it.
    """
    if not (changes.hold or changes.resume or ran):
        return [], []
    ids, rows = [*changes.hold, *changes.resume], Timeout.objects.using(using)
    locked = [
        row for chunk in chunks(ids) for row in lock_in_slot_order(rows.filter(pk__in=chunk, slot_taken=1), using)
    ]
    now, ended = database_now(using), holding.end_passed(locked, using)
    if noted := [row for row in locked if row.held_by_hand]:
        for row in noted:
            row.held_when = row.pk in changes.hold
        update_each(noted, using, (State.HELD,))
    running = [*ran, *(row for row in locked if row.pk in changes.hold and row.state == State.PENDING)]
    stopped = [row for row in locked if row.pk in changes.resume and row.state == State.HELD and not row.held_by_hand]
    resumed = [*ended, *holding.resume(stopped, using, now, by="save")]
    return holding.hold(running, using, now, by="save"), resumed


def _cancel(cancel: dict[int, tuple[RowState, Timeout.Cause]], using: str) -> None:
    for cause in sorted({cause for _, cause in cancel.values()}):
        # A row with a former queue or label of its policy keeps its entry, which a worker checks unnecessarily.
        found = {row_id: state.policy for row_id, (state, its_cause) in cancel.items() if its_cause == cause}
        lines = {row_id: (policy.queue, policy.label) for row_id, policy in found.items()}
        for ids in chunks(list(lines)):
            if len(ids) > 1:  # in the order of their slots, as everywhere
                lock_in_slot_order(Timeout.objects.using(using).filter(pk__in=ids, slot_taken=1), using)
            writing.cancel_ids({row_id: lines[row_id] for row_id in ids}, using, cause)
