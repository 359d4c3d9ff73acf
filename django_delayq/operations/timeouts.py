"""The operations on timeouts, also on those whose object or policy no longer exists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Unpack

from django.db import Error as DatabaseError
from django.db.models import Q
from django.utils.translation import gettext

from django_delayq import signals
from django_delayq.arming import holding
from django_delayq.conf import ConfigError, get_settings
from django_delayq.exceptions import DelayqError, InvalidDelay, UnknownPolicy
from django_delayq.ledger import installation, writing
from django_delayq.ledger.error_texts import message_of
from django_delayq.ledger.locking import transaction_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import count, labels_in
from django_delayq.ledger.subjects import subject_at
from django_delayq.models import WAITING, PolicyChange, Timeout
from django_delayq.operations.changes import PolicyConflict
from django_delayq.operations.runner import (
    Action,
    Context,
    How,
    Progress,
    Refusal,
    Result,
    Target,
    checked_actor,
    refuse_round,
    refuse_unless_pending,
    refuse_unless_waiting,
)
from django_delayq.policy.policies import registry
from django_delayq.rounds import events
from django_delayq.rounds.memory import clipped, record, record_death
from django_delayq.scheduling.by_hand import checked_end
from django_delayq.sql.now import database_now
from django_delayq.times import clock
from django_delayq.times.clock import check_length, check_moment, plural, shifted
from django_delayq.times.lengths import DelayArgs, added, parse_delay, relations_of
from django_delayq.times.spans import Length

logger = logging.getLogger("django_delayq.operations")
State = Timeout.State


def cancel(target: Target, **how: Unpack[How]) -> Result:
    """Cancel pending, held and dead timeouts; those that are firing get no further attempt.

    The latter are refused as `NO_RETRY`.

    Args:
        target: a `Timeout`, or a queryset or iterable of them. Each page of 500 is one transaction, or part of the
            caller's. TypeError: it is something else.
        by, reason: see `operations`.
        dry_run: count, and write nothing.
        progress: called with the result of each page, after its commit.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        if row.state == State.FIRING:
            return Refusal.NO_RETRY
        return None if row.state == State.DEAD else refuse_unless_waiting(row, context)

    def write(rows: list[Timeout], context: Context) -> None:
        for row in rows:
            record_death(row, context.now)
            record(row, "cancel_requested", **context.event)
        # Those that are firing are among the refused.
        writing.forbid_attempts(context.refused, context.using, context.reason, context.now, context.by)
        writing.cancel_rows(rows, context.using, context.reason, context.now)

    return Action("cancel", signals.timeout_cancelled, refuse, write, is_by_state=True).run(target, **how)


def fire_now(target: Target, **how: Unpack[How]) -> Result:
    """Make pending timeouts due now, so that a worker fires them, if `when` holds.

    A future deadline becomes now; a past one stays. Nothing fires in this process. Timeouts that are on hold or paused,
    and those of a policy that is, are refused. Arguments and errors are those of `cancel`.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        policy = registry.get(row.policy)
        if why := refuse_unless_pending(row, context):
            return why
        if policy is None:
            return Refusal.POLICY_UNKNOWN
        context.fires(row, policy.label not in context.stopped)
        return Refusal.POLICY_STOPPED if policy.label in context.stopped else None

    def write(rows: list[Timeout], context: Context) -> None:
        moves = [(row, min(row.due_at, context.now), context.now) for row in rows]
        writing.move_rows(moves, context.facts, what="fire_requested", to=context.now, **context.event)

    return Action("fire_now", signals.timeout_rescheduled, refuse, write, is_by_state=True).run(target, **how)


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

    A duration counts from the deadline, or from now if that has passed. If the clock of a timeout is stopped, it stays
    stopped: a duration is added to the rest of its time, and a datetime is the deadline if its clock ran from now.

    Neither `max_extensions` nor `Limits(total=...)` applies, and no extension is used up. A retry or snooze that is due
    even later keeps its time. A deadline never becomes earlier: see `fire_now`. The other arguments and errors are
    those of `cancel`.

    Raises:
        InvalidDelay: no delay, a wrong one, or a datetime in the past.
    """
    given = parse_delay(dict(delay))
    if given is None:
        raise InvalidDelay(gettext("The new deadline is missing: give units, after= or at=."))
    if given.at is not None and given.at <= clock.now():
        words = gettext("{moment} is in the past. To fire it now, use another operation: fire.")
        raise InvalidDelay(words.format(moment=clock.local(given.at)))

    relations = relations_of(given.after) if given.after else ()

    def later(row: Timeout, context: Context) -> datetime:
        obj = context.facts.of(row, relations) if given.needs_object else None
        start = holding.extended_from(row) if row.has_stopped_clock else max(row.due_at, context.now)
        return given.at or added(given.after or timedelta(0), start, obj)

    action = _moves("postpone", "postponed", later, Refusal.NOT_LATER, by=given.after)
    action.arguments = given.after  # None: a datetime, to which each row is moved once
    return action.run(target, by=by, reason=reason, dry_run=dry_run, progress=progress)


def _moves(
    name: str, what: str, new: Callable[[Timeout, Context], datetime], unless: Refusal, *, by: Length | None
) -> Action:
    """Return the action that gives pending and held rows `new` deadlines.

    Args:
        what: the event in the history of each row.
        unless: why a row is refused whose deadline would not change, or for `NOT_LATER` would become earlier.
        by: the duration by which the deadlines are moved; None: the new deadline is given.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        if why := refuse_unless_waiting(row, context):
            return why
        try:
            due_at = new(row, context)
        except InvalidDelay:
            return Refusal.TOO_FAR
        is_stopped = row.has_stopped_clock and by is None
        before = holding.if_resumed(row, context.facts).due_at if is_stopped else row.due_at
        if due_at == before or (due_at < before and unless is Refusal.NOT_LATER):
            return unless
        context.fires(row, writing.run_at_of(row, due_at, context.facts) <= context.now)
        return None

    def write(rows: list[Timeout], context: Context) -> None:
        holding.end_passed(rows, context.facts)
        deadlines = [(row, new(row, context)) for row in rows]
        for row, due_at in deadlines:
            events.retarget(row, due_at, context.facts, is_given=by is None)
        moves = [(row, due_at, writing.run_at_of(row, due_at, context.facts)) for row, due_at in deadlines]
        writing.move_rows(moves, context.facts, what=what, fixed=by is None, **context.event)

    return Action(name, signals.timeout_rescheduled, refuse, write)


def change_deadline(
    target: Target, *, at: datetime | None = None, shift: timedelta | None = None, **how: Unpack[How]
) -> Result:
    """Move deadlines of pending timeouts, earlier or later: to `at`, or by `shift`; one in the past becomes now.

    Then the timeout is due at once, and `Result.due_at_once` counts it.
    Neither `max_extensions` nor `Limits(total=...)` applies, and no extension is used up. A retry or snooze that is due
    later keeps its time: see `fire_now`. The other arguments and errors are those of `cancel`.

    Args:
        at: the new deadline, the same for all.
        shift: a duration, negative for earlier, that is added to each deadline.

    Raises:
        InvalidDelay: not exactly one of `at` and `shift` is given, or a wrong one.
    """
    if (at is None) == (shift is None):
        raise InvalidDelay(gettext("The new deadline is missing: give either at= or shift=."))
    fixed = None if at is None else check_moment(at, "at")
    by_how_much = timedelta(0) if shift is None else check_length(shift, "shift", may_be_negative=True)

    def moved(row: Timeout, context: Context) -> datetime:
        due_at = fixed or shifted(row.due_at, by_how_much)
        return due_at if row.has_stopped_clock and fixed is None else max(due_at, context.now)

    action = _moves("change_deadline", "deadline_changed", moved, Refusal.SAME_DEADLINE, by=shift)
    action.arguments = shift
    return action.run(target, **how)


def retry(target: Target, **how: Unpack[How]) -> Result:
    """Make dead timeouts pending and due now, with all their attempts; a worker fires them.

    The round stays the same, with its deadline and `idempotency_key`, so that an earlier attempt's effect outside the
    database is not repeated. Refused if the object is gone, the policy is no longer declared, or the object has a newer
    round, whose effect or cancellation the retry could contradict. Arguments and errors are those of `cancel`.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        if row.state != State.DEAD:
            return Refusal.NOT_DEAD
        why = refuse_round(row, context, is_same_round=True)
        context.fires(row, why is None)
        return why

    def write(rows: list[Timeout], context: Context) -> None:
        writing.revive(rows, context.using, context.now, by=context.by, reason=context.reason)

    return Action("retry", signals.timeout_scheduled, refuse, write, begins_rounds=True).run(target, **how)


def refire(target: Target, *, at: datetime | None = None, **how: Unpack[How]) -> Result:
    """Repeat settled timeouts: each gets a new round, a new row with the same payload, key and queue.

    The settled row stays, and the histories of both name each other. The new one has all its attempts, and its own
    `idempotency_key`, so that effects outside the database are repeated. A worker fires it if `when` holds. Refused if
    the object is gone, the policy is no longer declared, or a round is pending. Of several rounds of one object only
    the newest is repeated. The other arguments and errors are those of `cancel`.

    Args:
        at: the deadline of the new rounds; by default, and if it has passed, now.

    Raises:
        InvalidDelay: `at` is not a datetime, its awareness does not fit `USE_TZ`, or it is too far in the future; or
            the policy's `since` raised an error for an object, whose page of rows stays unchanged.
    """
    wanted = None if at is None else check_moment(at, "at")

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        why = refuse_round(row, context) if row.is_settled else Refusal.NOT_SETTLED
        context.fires(row, why is None and (wanted is None or wanted <= context.now))
        return why

    def write(rows: list[Timeout], context: Context) -> list[Timeout]:
        due_at = max(wanted or context.now, context.now)
        new = [_repetition(row, due_at, context) for row in rows]
        writing.insert(new, context.using)
        for row, repetition in zip(rows, new, strict=True):
            record(row, "refired", timeout=repetition.pk, to=due_at, **context.event)
            record(repetition, "refires", timeout=row.pk, **context.event)
        writing.write_histories([*rows, *new], context.using)
        return new

    action = Action("refire", signals.timeout_scheduled, refuse, write, begins_rounds=True, arguments=("at", at))
    return action.run(target, **how)


def _repetition(row: Timeout, due_at: datetime, context: Context) -> Timeout:
    """Return an unsaved round like `row`.

    It counts from the present value of `since`: arming leaves a pending round with this value alone, although a former
    round has closed it, and would move or cancel one with another value.
    """
    policy: Any = registry.get(row.policy)
    obj = context.facts.of(row, policy.relations)
    subject = subject_at(policy, obj.pk, row.key, context.using)
    try:
        since_at = policy.since_of(obj)
    except DatabaseError:
        raise
    except Exception as error:  # `since` of the application
        words = f"{policy.label}: `since` fails for object {row.object_id}: {type(error).__name__}: {message_of(error)}"
        raise InvalidDelay(words) from error
    values = {"payload": row.payload, "queue": row.queue, "reason": context.reason, "is_requested": True}
    return writing.new_row(subject, due_at, since_at, **values)


def retire(label: str, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None) -> Result:
    """Cancel the pending timeouts of the policy `label`, which is not declared any more, with the cause `retired`.

    Until then workers leave them pending, because another release may declare the policy. Dead rows stay. Each page of
    500 rows is one transaction, or part of the caller's. A `PolicyChange` counts the rows, page by page, and the call
    may be interrupted and repeated.

    Args:
        label: the label that the rows have, such as `shop.order.cancel_unpaid`.
        by, reason: see `operations`.
        dry_run: count, and write nothing.
        progress: called with the result of each page, after its commit.

    Raises:
        PolicyConflict: a policy with this label, or with this alias, is declared. Nothing was changed.
        UnknownPolicy: the ledger has no timeout with this label.
    """
    by, using, policy = checked_actor(by), database_of(Timeout), registry.get(label)
    if policy is not None:
        words = gettext("{policy} is declared in {handler}. Remove the declaration first.")
        raise PolicyConflict(words.format(policy=policy.label, handler=policy.handler_path))
    ledger = Timeout.objects.using(using)
    known = labels_in(ledger)
    if label not in known:
        undeclared = [found for found in known if registry.get(found) is None]
        raise UnknownPolicy(
            f"No timeout has the policy {label!r}. Not declared, but in the ledger: {', '.join(undeclared) or 'none'}."
        )
    rows, now = ledger.waiting().of_labels([label]), database_now(using)
    change = PolicyChange(policy=label, what=PolicyChange.What.RETIRED, at=now, touched_at=now, finished_at=now)
    change.by, change.reason = by, clipped(reason)

    def write(accepted: list[Timeout], context: Context) -> None:
        for row in accepted:
            record(row, "retired", **context.event)
        writing.cancel_rows(accepted, using, context.reason, context.now, cause=Timeout.Cause.RETIRED)
        # Each page is counted in its transaction: a process that dies leaves a record of what it has done.
        change.moved += len(accepted)
        change.save(using=using)

    action = Action("retire", signals.timeout_cancelled, refuse_unless_waiting, write, is_by_state=True)
    return action.run(rows, by=by, reason=reason, dry_run=dry_run, progress=progress)


@dataclass(frozen=True, slots=True)
class Adoption:
    """What `adopt` did, or with `dry_run` would do.

    Attributes:
        before: the former name of the ledger; None: it had none.
        name: the present one. If both are equal, nothing was changed.
        cancelled: the number of cancelled timeouts.
        renewed: the number of timeouts with a new `idempotency_key`: dead ones, and pending ones that are kept.
    """

    before: str | None
    name: str
    cancelled: int = 0
    renewed: int = 0


def adopt(
    *,
    by: str,
    reason: str = "",
    pending: Literal["cancel", "keep"] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    using: str | None = None,
) -> Adoption:
    """Give the ledger the name in `DELAYQ["INSTALLATION"]`, so that workers of this installation accept it.

    Timeouts that may fire here get new idempotency keys, because receivers of the former ones may belong to the other
    installation. Heartbeats and claims of the former workers are deleted. Outside a transaction each page of 500 rows
    is a transaction. The name is written last: a process that dies before leaves a ledger that workers still refuse,
    and the next call continues with the rows that are left.

    Args:
        by, reason: see `operations`. They are stored in the history of each row.
        pending: `"cancel"` pending and firing timeouts by hand, or `"keep"` them. Required if there are any.
        dry_run: count, and write nothing.
        progress: called with the result of each page, after its commit.
        using: the database; by default where the routers write the ledger.

    Raises:
        ConfigError: `INSTALLATION` is not set.
        DelayqError: `pending` is missing. Nothing was changed.
        ValueError: `by` is empty, or `pending` has another value.
    """
    by, name, using = checked_actor(by), get_settings().installation, using or database_of(Timeout)
    if name is None:
        raise ConfigError("DELAYQ['INSTALLATION'] is not set: give this installation a name of its own first.")
    if pending not in ("cancel", "keep", None):
        raise ValueError(f'pending is "cancel", "keep" or None, not {pending!r}.')
    done = Adoption(installation.ledger_name(using), name)
    if done.before != name:
        done = _change_rows(done, using, pending, by=by, reason=reason, dry_run=dry_run, progress=progress)
    if done.before != name and not dry_run:
        with transaction_of(using):
            installation.assign(using, name)
        logger.info(
            "The database of %r was adopted as %r by %s: %s cancelled, %s renewed",
            *(done.before, name, by, plural(done.cancelled, "timeout"), plural(done.renewed, "idempotency key")),
            extra={"event": "adopted", "by": by, "reason": reason, "before": done.before, "installation": name},
        )
    return done


def _change_rows(done: Adoption, using: str, pending: str | None, **options: Any) -> Adoption:
    rows = Timeout.objects.using(using)
    if pending is None and (number := count(rows.unsettled())).value:
        words = f"This database has {plural(number, 'pending timeout')}: give --cancel-pending or --keep-pending."
        raise DelayqError(words)
    kept, cancelled = Q(state=State.DEAD), 0
    if pending == "cancel":
        action = Action("cancel", signals.timeout_cancelled, _refuse_settled, _cancel)
        cancelled = action.run(rows.unsettled(), **options).changed
    else:
        kept |= Q(settled_at__isnull=True)
    action = Action("adopt", signals.timeout_rescheduled, _refuse_settled, _renew)
    return replace(done, cancelled=cancelled, renewed=action.run(rows.filter(kept), **options).changed)


def _refuse_settled(row: Timeout, context: Context) -> Refusal | None:
    return Refusal.SETTLED if row.is_settled and row.state != State.DEAD else None


def _cancel(rows: list[Timeout], context: Context) -> None:
    # Firing ones too: the process that fired them in the copied database does not run here.
    for row in rows:
        record(row, "cancel_requested", **context.event)
    states = (*WAITING, State.FIRING)
    writing.cancel_rows(rows, context.using, context.reason, context.now, states=states)


def _renew(rows: list[Timeout], context: Context) -> None:
    for row in rows:
        record(row, "adopted", **context.event)
    writing.renew_keys(rows, context.using)


def hold_timeout(target: Target, *, until: datetime | None = None, **how: Unpack[How]) -> Result:
    """Hold pending timeouts by hand: nothing fires, and the rest of their time is kept.

    Those that are held already get another end. They can be cancelled and postponed meanwhile. The other arguments and
    errors are those of `cancel`.

    Args:
        until: a datetime in the future, at which the hold ends; None: until they are resumed.

    Raises:
        InvalidDelay: `until` has passed, is not a datetime, or its awareness does not fit `USE_TZ`.
    """
    return _hold("hold_timeout", target, until, False, **how)


def pause_timeout(target: Target, *, until: datetime | None = None, **how: Unpack[How]) -> Result:
    """Let pending timeouts not fire until they are resumed, although their deadlines stay where they are.

    Then those are due at once whose deadlines have passed. A clock that is stopped already stays stopped by hand, with
    the rest of its time. The other arguments and errors are those of `cancel`, and `until` that of `hold_timeout`.
    """
    return _hold("pause_timeout", target, until, True, **how)


def _hold(name: str, target: Target, until: datetime | None, keep_deadline: bool, **how: Unpack[How]) -> Result:
    end = checked_end(until)

    def write(rows: list[Timeout], context: Context) -> None:
        holding.end_passed(rows, context.facts)
        event = {"by": context.by, "reason": context.reason}
        holding.hold_by_hand(rows, context.facts, end, keep_deadline=keep_deadline, **event)

    return Action(name, signals.timeout_held, refuse_unless_waiting, write, is_by_state=True).run(target, **how)


def resume_timeout(target: Target, **how: Unpack[How]) -> Result:
    """End the holds and pauses by hand: a deadline moves by the time of its policy that was stopped.

    One that is paused has its former deadline. `Result.due_at_once` counts those that are due then. The clocks of
    timeouts for which `hold_when` of their policy holds stay stopped until it does not. Arguments and errors are those
    of `cancel`.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        if why := refuse_unless_waiting(row, context) or (None if row.held_by_hand else Refusal.NOT_HELD):
            return why
        facts = context.facts
        context.fires(row, not facts.is_on_hold(row) and holding.if_resumed(row, facts).run_at <= facts.now)
        return None

    def write(rows: list[Timeout], context: Context) -> list[Timeout]:
        return holding.end_hold_by_hand(rows, context.facts, by=context.by, reason=context.reason)

    return Action("resume_timeout", signals.timeout_resumed, refuse, write).run(target, **how)
