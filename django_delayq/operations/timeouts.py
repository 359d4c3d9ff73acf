"""Cancel, fire, postpone and retry timeouts, also if their object or policy no longer exists."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from django.utils.translation import gettext as _

from django_delayq import clock, signals
from django_delayq.delays import check_length, parse_delay, shifted
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import writing
from django_delayq.ledger.history import record, record_death
from django_delayq.ledger.settling import slot_is_taken
from django_delayq.models import Timeout, slot_of
from django_delayq.operations.runner import Action, Context, Refusal, Result, run
from django_delayq.policies import registry

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Unpack

    from django_delayq.delays import Delay, DelayArgs
    from django_delayq.operations.runner import Progress, Target

State = Timeout.State


def cancel(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Cancel pending and dead timeouts; those that are firing get no further attempt.

    Args:
        target: a `Timeout`, or a queryset or iterable of them. Each page of 500 is one transaction, or part of the
            caller's. TypeError: it is something else.
        by, reason: see `operations`.
        dry_run: count, and write nothing.
        progress: called with the result of each page, after its commit.
    """
    action = Action("cancel", signals.timeout_cancelled, _refuse_cancel, _write_cancel)
    return run(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def _refuse_cancel(row: Timeout, context: Context) -> Refusal | None:
    return None if row.state == State.DEAD else _refuse_unless_pending(row)


def _write_cancel(rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
    for row in rows:
        record_death(row, context.now)
        record(row, "cancel_requested", **context.event)
    for row in refused:
        if row.state == State.FIRING:
            writing.forbid_attempts(row, context.reason, by=context.by)
    writing.cancel_rows(rows, context.using, context.reason, context.now)


def fire_now(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Make pending timeouts due now, so that a worker fires them, if `when` holds.

    A future deadline becomes now; a past one stays. Nothing fires in this process. Timeouts of a policy that is paused
    or on hold are refused. Arguments and errors are those of `cancel`.
    """
    action = Action("fire_now", signals.timeout_rescheduled, _refuse_fire, _write_fire)
    return run(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def _refuse_fire(row: Timeout, context: Context) -> Refusal | None:
    if why := _refuse_unless_pending(row):
        return why
    policy = registry.get(row.policy)
    if policy is None:
        return Refusal.POLICY_UNKNOWN
    return Refusal.POLICY_STOPPED if policy.label in context.stopped else None


def _write_fire(rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
    moves = [(row, min(row.due_at, context.now), context.now) for row in rows]
    writing.move_rows(moves, context.using, what="fire_requested", to=context.now, **context.event)


def postpone(
    target: Target,
    *,
    by: str,
    reason: str = "",
    dry_run: bool = False,
    progress: Progress | None = None,
    **delay: Unpack[DelayArgs],
) -> Result:
    """Give pending timeouts a later deadline: later by units or `after=`, or `at=` a datetime.

    A duration counts from the deadline, or from now if that has passed. `max_extensions` does not apply and is not
    used up. A retry or snooze that is due even later keeps its time. A deadline never becomes earlier: see `fire_now`.
    The other arguments and errors are those of `cancel`.

    Raises:
        InvalidDelay: no delay, a wrong one, or a datetime in the past.
    """
    given = parse_delay(dict(delay))
    if given is None:
        raise InvalidDelay(_("The new deadline is missing: give units, after= or at=."))
    if given.at is not None and given.at <= clock.now():
        words = _("{moment} is in the past. To fire it now, use fire_now.")
        raise InvalidDelay(words.format(moment=given.at))
    action = Action(
        "postpone", signals.timeout_rescheduled, partial(_refuse_postpone, given), partial(_write_postpone, given)
    )
    return run(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def _refuse_postpone(given: Delay, row: Timeout, context: Context) -> Refusal | None:
    if why := _refuse_unless_pending(row):
        return why
    try:
        return None if _postponed(given, row, context.now) > row.due_at else Refusal.NOT_LATER
    except InvalidDelay:
        return Refusal.TOO_FAR


def _write_postpone(given: Delay, rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
    deadlines = [(row, _postponed(given, row, context.now)) for row in rows]
    moves = [(row, due_at, writing.run_at_of(row, due_at)) for row, due_at in deadlines]
    writing.move_rows(moves, context.using, what="postponed", **context.event)


def _postponed(given: Delay, row: Timeout, now: datetime) -> datetime:
    return given.at or shifted(max(row.due_at, now), check_length(given.after, "after"))


def retry(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Make dead timeouts pending and due now, with all their attempts; a worker fires them.

    The round stays the same, with its deadline and `idempotency_key`, so that an earlier attempt's effect outside the
    database is not repeated. Refused if the object is gone, the policy is no longer declared, or a newer round is
    pending. Arguments and errors are those of `cancel`.
    """
    action = Action("retry", signals.timeout_scheduled, _refuse_retry, _write_retry)
    return run(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def _refuse_retry(row: Timeout, context: Context) -> Refusal | None:
    policy = registry.get(row.policy)
    if row.state != State.DEAD:
        return Refusal.NOT_DEAD
    if policy is None:
        return Refusal.POLICY_UNKNOWN
    if context.page.object_of(row) is None:
        return Refusal.OBJECT_GONE
    slots = {slot_of(label, row.content_type_id, row.object_id, row.key) for label in policy.labels}
    if slots & context.slots or slot_is_taken(row, policy.labels, context.using):
        return Refusal.SLOT_TAKEN
    context.slots |= slots
    return None


def _write_retry(rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
    for row in rows:
        record_death(row, context.now)
        record(row, "retried", to=context.now, **context.event)
    writing.revive(rows, context.using, context.now)


def _refuse_unless_pending(row: Timeout) -> Refusal | None:
    if row.state == State.PENDING:
        return None
    return {State.FIRING: Refusal.FIRING, State.DEAD: Refusal.DEAD}.get(State(row.state), Refusal.SETTLED)
