"""Settle attempts: write what the outcome of each means for its row, if the row is still that of the attempt.

What is raised is written by a second, short transaction after the rollback; what a handler returns, by its own one.
`rounds/after_attempt.py` decides what is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import IntegrityError, connections

from django_delayq.firing import steps
from django_delayq.firing.handler import checkpoint, firing_transaction, tracked
from django_delayq.firing.log_lines import log_failure, log_snooze
from django_delayq.firing.members import Member
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call, Report, RunningWork, Work
from django_delayq.ledger import marking
from django_delayq.ledger.db_connections import transient_reason
from django_delayq.ledger.error_texts import error_details, message_of
from django_delayq.ledger.outbox import record_settled
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import Fired, GiveUp, Outcome, Skip, Snooze
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.rounds import after_attempt
from django_delayq.rounds.after_attempt import AttemptFacts, Change, TransientFailure, WorkerDied
from django_delayq.rounds.columns import ATTEMPTS
from django_delayq.times import clock

logger = logging.getLogger("django_delayq.firing")
State = Timeout.State

UNDECLARED_GRACE: Final = timedelta(minutes=1)
"""How long an expired row of a policy that is not declared here is left to workers that know the policy."""
MAX_LOSSES: Final = 5
"""How often in a row a handler may lose its connection to the database before that counts as a failed attempt."""
SETTLE_PAUSES_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 5, 8, 10)
"""The work of a handler outside a transaction cannot be rolled back, so its settling is tried for half a minute."""
_WITHOUT_DETAILS: Final = (Fired, Skip, GiveUp, WorkerDied, TransientFailure)
"""Outcomes of which the history needs no error. A snooze without an end is an error."""


def settle_expired(using: str, limit: int = 1000) -> Report:
    """Settle rows whose `firing` has expired: pending again as suspects, dead, cancelled or superseded.

    At most `limit`, the longest expired first. Any number of workers may do so at once. Raises the errors of the
    database, after the signals for rows that were settled before.
    """
    report = ReportBuilder()
    try:
        record_deaths(report, using, limit)
    finally:
        report.publish(using)
    return report.report()


def record_deaths(report: ReportBuilder, using: str, limit: int, ids: Collection[int] | None = None) -> None:
    """Record the deaths of at most `limit` expired `firing` rows, only of `ids` if given, and add them to `report`."""
    long_ago = clock.now() - UNDECLARED_GRACE
    for row in marking.expired(using, limit, ids):
        seen = {"state": row.state, "attempts": row.attempts, "run_at": row.run_at}
        policy = registry.get(row.policy)
        if policy is None and row.run_at > long_ago:
            continue  # a worker that knows the policy also knows its retries
        error = WorkerDied("The process that ran this attempt died, or was cut off for longer than its lease.")
        work = Work(row.policy, (row.pk,), (row.object_id,))
        try:
            with tracked(RunningWork(work, using, report, policy)):  # of a receiver of `timeouts_settling`
                report.add(settle(policy, error, using, Call((row.pk,), seen)))
        except Exception as failure:
            if transient_reason(failure, using) and connections[using].connection is None:  # it was lost
                raise
            # Only this row, for example by the retries of its policy, or because another transaction has scheduled the
            # next round in its slot: it must not keep those behind it from being settled.
            report.release_unknown(row.policy, [row.pk], failure, using)


def settle(
    policy: TimeoutPolicy[Any] | None,
    outcome: Fired | BaseException,
    using: str,
    call: Call,
    *,
    is_superseded: bool = False,
) -> ReportBuilder:
    """Commit what `outcome` means for the timeout of `call`, unless it was moved, cancelled or tried meanwhile.

    Args:
        policy: None: not declared here any more; the default retries apply.
        outcome: what the handler has returned or raised: an outcome, or a failure.
        using: the database.
        call: the call of the handler.
        is_superseded: a newer round has just taken the slot, as an IntegrityError has shown.
    """
    report, change, [timeout_id] = ReportBuilder(), None, call.timeout_ids
    is_done = isinstance(outcome, Fired)
    if not is_done:
        checkpoint("undone")
    try:
        with firing_transaction(using):
            row, now = report.lock_or_release(timeout_id, using)
            if row is None:
                return report
            if _is_same_attempt(row, call.seen, now, is_done=is_done):
                found = change_of(policy, row, outcome, now, call)
                change = found if write(row, found, now, is_superseded=is_superseded) else None
                record_settled([row] if change else [], using)
    except IntegrityError:
        if is_superseded:
            raise
        return settle(policy, outcome, using, call, is_superseded=True)
    if not is_done:
        checkpoint("recorded")
    tell(report, row, outcome, change, call)
    return report


def _is_same_attempt(row: Timeout, seen: dict[str, Any] | None, now: datetime, *, is_done: bool) -> bool:
    """Return whether the locked `row` is still that of an attempt whose row was `seen`.

    It may be pending again, because it expired although this process was running. What `is_done` need not be done
    again. If it has begun once more since then, that was noted.
    """
    if seen is None:
        return row.state == State.PENDING and row.run_at <= now
    if is_done and row.is_waiting:
        seen = {**seen, "state": row.state, "suspected_at": row.suspected_at, "attempts": seen["attempts"] - 1}
    return all(getattr(row, name) == value for name, value in seen.items())


def change_of(
    policy: TimeoutPolicy[Any] | None, row: Timeout, outcome: Fired | BaseException, now: datetime, call: Call
) -> Change:
    """Return what the outcome of `call` means for a row that was not changed meanwhile."""
    facts = AttemptFacts(planned_at=call.planned_at)
    if isinstance(outcome, Snooze):
        try:
            facts = facts._replace(until=outcome.delay.due_from(now, call.obj))
        except Exception as wrong:  # noqa: BLE001 - a span of the application, or one that did not call `__init__`
            outcome = wrong
    if facts.until is None and not isinstance(outcome, _WITHOUT_DETAILS):
        facts = facts._replace(failure=error_details(outcome, row))
    if row.step and policy is not None:
        then, over = steps.following_of(policy, row, call.obj)
        facts = facts._replace(then=then, over=over)
    return after_attempt.values_of(policy, row, outcome, now, facts)


def write(row: Timeout, change: Change, now: datetime, *, is_superseded: bool = False) -> bool:
    """Write `change` into `row` by compare-and-set; return False if that was changed meanwhile.

    A row that would take its slot again is settled if a newer round was scheduled.
    """
    using = row._state.db or "default"
    takes_slot = change.values.get("slot_taken") and not row.slot_taken
    if takes_slot and (is_superseded or marking.is_superseded(row, using)):
        change = after_attempt.superseded(row, change, now)
    return marking.compare_and_set(row, using, **change.values)


def tell(
    report: ReportBuilder, row: Timeout, outcome: Fired | BaseException, change: Change | None, call: Call
) -> None:
    """Add to `report` what `outcome` has made of `row`, and log it. `change`: None: the row was changed meanwhile."""
    if isinstance(outcome, BaseException):
        report.errors[row.pk] = outcome
        report.calls.append(call)
    if change is not None and (row.is_settled or change.error is not None):
        report.add_outcomes([row])
    else:
        report.add_row(row)
    if change is not None and change.ended is not None:
        report.steps.append((row, change.ended, call, change.error))
    else:
        log(row, outcome, change, report.current_time(), call)


def keep(
    policy: TimeoutPolicy[Any], member: Member, outcome: Outcome | Fired, now: datetime, call: Call
) -> Change | None:
    """Write what a handler or a step has returned, in the transaction that has marked its row.

    Return what `log` needs; None: it has nothing to say. A snoozed row takes its slot again, unless the handler has
    scheduled the next round: then that one replaces it. A step may have moved or cancelled its row itself. Raises
    InvalidDelay for a snooze that has no end, which undoes the work.
    """
    row, before, again = member.row, member.row, {"cause": "", "settled_at": None}
    if member.given is not None:
        before = after_attempt.before_attempt(member.given)
        again = {name: getattr(before, name) for name in ("step", "steps_over", *ATTEMPTS)}
    change = change_of(policy, before, outcome, now, replace(call, obj=member.obj))
    if change.error is not None and not isinstance(change.error, GiveUp):
        raise change.error
    if change.values.get("state") == State.PENDING and change.ended is None:  # as before it was marked
        change = change._replace(values={**again, **change.values})
    if change.values and write(row, change, now):
        member.ended = change.ended
    return None if change.ended or isinstance(outcome, Fired) else change


def log(row: Timeout, outcome: Fired | BaseException, change: Change | None, now: datetime, call: Call) -> None:
    """Log an outcome that is committed, except that of a step that has ended. `change`: see `tell`."""
    if change is not None and change.error is not None:
        log_failure(row, change.error, now, call, is_recorded=True)
    elif change is not None and isinstance(outcome, Snooze) and row.state == State.PENDING:
        log_snooze(row, now, message_of(outcome, row) if outcome.reason else "", call)
    elif not isinstance(outcome, (Outcome, *_WITHOUT_DETAILS)):  # the worker that recorded a death logs it
        log_failure(row, outcome, now, call, is_recorded=False)


def log_undone(policy: TimeoutPolicy[Any], outcome: Outcome) -> None:
    """Warn once a minute that a handler had written before it raised an outcome: what it wrote is undone."""
    name = type(outcome).__name__
    if firing_state.is_time_to_log((policy.label, "outcome_undoes")):
        logger.warning(
            "The handler of %s has raised %s after it had written to the database: that is undone. Write `return "
            "%s(...)` to keep it, or raise before anything is written.",
            *(policy.label, name, name),
            extra={"event": "outcome_undoes", "policy": policy.label},
        )


def reason_to_repeat(
    error: BaseException,
    using: str,
    call: Call | None,
    driver_connection: object,
    errors: Sequence[BaseException] = (),
) -> str | None:
    """Describe the transient database error by which `call` failed, so that it does not count; None: it counts.

    The other arguments are those of `transient_reason`. A handler that loses its connection each time most likely is
    the cause: it is silent for longer than the server or a firewall waits, or crashes the server. It would be called
    again and again without end, with its effects outside the database.
    """
    reason = transient_reason(error, using, errors, driver_connection)
    if reason is None or call is None or driver_connection is connections[using].connection:  # not lost
        return reason
    losses = [firing_state.backoff.note_loss(using, timeout_id) for timeout_id in call.timeout_ids]
    return None if min(losses) > MAX_LOSSES else reason


def persistently(settle: Callable[[], ReportBuilder], timeout_id: int, using: str) -> ReportBuilder:
    """Return what `settle` returns, and repeat it while the row is locked or the database fails.

    If it never succeeds, the handler runs again; with `atomic=False` when the row expires.
    """
    for pause in SETTLE_PAUSES_SECONDS:
        try:
            report = settle()
            if timeout_id not in report.uncounted:
                return report
        except Exception as error:
            if transient_reason(error, using) is None:
                raise
        time.sleep(pause)
    return settle()
