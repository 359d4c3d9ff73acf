"""Record what a handler, or `confirm`, has decided, and failed attempts.

What is raised is recorded by a second, short transaction after the rollback; what a handler returns, by its own one.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import IntegrityError, connections

from django_delayq.conf import get_settings
from django_delayq.firing import steps
from django_delayq.firing.handler import checkpoint, firing_transaction
from django_delayq.firing.log_lines import log_failure, log_snooze
from django_delayq.firing.members import Member
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call, Report
from django_delayq.ledger import settling
from django_delayq.ledger.db_connections import transient_reason
from django_delayq.ledger.errors import error_details, message_of
from django_delayq.ledger.outbox import record_settled
from django_delayq.ledger.planned import following
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import Fired, GiveUp, Outcome, Skip, Snooze
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.policy.steps import DEAD, RAN, SKIPPED, Ended
from django_delayq.rounds import columns
from django_delayq.rounds.memory import DIED, clipped, with_event
from django_delayq.times import clock
from django_delayq.times.clock import plural

logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause

UNDECLARED_GRACE: Final = timedelta(minutes=1)
"""How long an expired row of a policy that is not declared here is left to workers that know the policy."""
MAX_LOSSES: Final = 5
"""How often in a row a handler may lose its connection to the database before that counts as a failed attempt."""
SETTLE_PAUSES_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 5, 8, 10)
"""The work of a handler outside a transaction cannot be rolled back, so its settling is tried for half a minute."""


MAX_DEATHS: Final = 3
"""One process, or two, may have been killed by a deployment, or by the system for lack of memory."""


class WorkerDied(Exception):
    """The process that ran this attempt died, or was cut off for longer than its lease."""


class TransientFailure(Exception):
    """A transient database error while an `atomic=False` handler ran: retry soon, count no attempt."""

    def __init__(self, why: str, wait: timedelta) -> None:
        super().__init__(why)
        self.wait = wait


class Verdict(NamedTuple):
    """The outcome for a row: its columns, and the error to log."""

    values: dict[str, Any]
    error: BaseException | None = None
    ended: Ended | None = None
    """How a step of the row has ended, so that what follows it is next; None: none has."""


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
    for row in settling.expired(using, limit, ids):
        seen = {"state": row.state, "attempts": row.attempts, "run_at": row.run_at}
        policy = registry.get(row.policy)
        if policy is None and row.run_at > long_ago:
            continue  # a worker that knows the policy also knows its retries
        error = WorkerDied("The process that ran this attempt died, or was cut off for longer than its lease.")
        try:
            report.add(record_error(policy, error, using, Call((row.pk,), seen)))
        except Exception as failure:
            if transient_reason(failure, using) and connections[using].connection is None:  # it was lost
                raise
            # Only this row, for example by the retries of its policy, or because another transaction has scheduled the
            # next round in its slot: it must not keep those behind it from being settled.
            report.release_unknown(row.policy, [row.pk], failure, using)


def record_error(
    policy: TimeoutPolicy[Any] | None, error: BaseException, using: str, call: Call, *, superseded: bool = False
) -> ReportBuilder:
    """Commit what `error` means for the timeout of `call`, unless it was moved, cancelled or tried meanwhile.

    Args:
        policy: None: not declared here any more; the default retries apply.
        error: what the handler raised: an outcome, or a failure.
        using: the database.
        call: the call of the handler.
        superseded: a newer round has just taken the slot, as an IntegrityError has shown.
    """
    report, verdict, [timeout_id] = ReportBuilder(), None, call.timeout_ids
    checkpoint("undone")
    try:
        with firing_transaction(using):
            row, now = report.lock_or_release(timeout_id, using)
            if row is None:
                return report
            if _is_unchanged(row, call.seen, now):
                is_death = isinstance(error, WorkerDied)
                found = verdict_of_death(row, now) if is_death else _verdict(policy, row, error, now, call.obj)
                if policy is not None and row.step:
                    found = of_step(policy, row, found, now, call.obj)
                values = found.values
                if row.state == State.FIRING:
                    newer = superseded or settling.is_superseded(row, using)
                    values = _of_firing(row, values, now, newer)
                verdict = found if settling.compare_and_set(row, using, **values) else None
                record_settled([row] if verdict else [], using)
    except IntegrityError:
        if superseded:
            raise
        return record_error(policy, error, using, call, superseded=True)
    checkpoint("recorded")
    report.errors[timeout_id] = error
    report.calls.append(call)
    if verdict is not None and (row.is_settled or verdict.error is not None):
        report.add_outcomes([row])
    else:
        report.add_row(row)
    if verdict is not None and verdict.ended is not None:
        steps.note(row, verdict.ended)
        report.note_steps([row], call, verdict.error)
    else:
        _log(row, error, verdict, now, call)
    return report


def record_step(ran: Timeout, call: Call, note: str, using: str, *, superseded: bool = False) -> ReportBuilder:
    """Let the row of a step that has run outside a transaction continue.

    Unless it was settled or moved to another round, or a new attempt of the step has begun. `ran`: the row as it was
    marked. `superseded`: see `record_error`.
    """
    report, policy, ended = ReportBuilder(), registry.get(ran.policy), Ended(RAN, ran.step, note)
    assert policy is not None
    try:
        with firing_transaction(using):
            row, now = report.lock_or_release(ran.pk, using)
            if row is None:
                return report
            is_moved = is_same_attempt(row, ran)
            if is_moved:
                values = steps.values_after(policy, row, call.obj, now, ended)
                if row.state == State.FIRING:
                    newer = superseded or settling.is_superseded(row, using)
                    values = _of_firing(row, values, now, newer)
                elif row.state == State.HELD:  # its clock was stopped meanwhile
                    values = {name: value for name, value in values.items() if name not in columns.waiting(now)}
                is_moved = settling.compare_and_set(row, using, **values)
                record_settled([row] if is_moved else [], using)
    except IntegrityError:
        if superseded:
            raise
        return record_step(ran, call, note, using, superseded=True)
    if is_moved and row.is_settled:
        report.add_outcomes([row])
    else:
        report.add_row(row)
    if is_moved:
        steps.note(row, ended)
        report.note_steps([row], call)
    return report


def is_same_attempt(row: Timeout, ran: Timeout) -> bool:
    """Return whether the locked `row` is still that of the attempt `ran`, whose work is done.

    It may be pending again, because it expired although this process was running. Its work need not be done again. If
    it has begun once more since then, that was noted.
    """
    is_same = row.state == State.FIRING and row.suspected_at == ran.suspected_at
    if not is_same and not row.is_waiting:
        return False
    attempts = ran.attempts if is_same else ran.attempts - 1
    is_same_round = (row.idempotency_key, row.due_at, row.step) == (ran.idempotency_key, ran.due_at, ran.step)
    return row.attempts == attempts and is_same_round


class Kept(NamedTuple):
    """An outcome that a handler has returned, and which is written in its transaction."""

    row: Timeout
    outcome: Outcome
    verdict: Verdict


def keep(
    policy: TimeoutPolicy[Any], member: Member, outcome: Outcome | Fired, now: datetime, using: str
) -> Kept | None:
    """Write what the handler has returned for a row that its transaction has marked as fired.

    None: it has fired. A snoozed row takes its slot again, unless the handler has scheduled the next round: then that
    one replaces it. Raises InvalidDelay for a snooze that has no end, which undoes the work.
    """
    row = member.row
    if member.given is not None:
        return _keep_of_step(policy, member, outcome, now, using)
    if isinstance(outcome, Fired):
        if outcome.reason:
            settling.compare_and_set(row, using, reason=clipped(outcome.reason))
        return None
    verdict = _verdict(policy, row, outcome, now, member.obj)
    if verdict.error is not None and not isinstance(verdict.error, GiveUp):
        raise verdict.error
    values = verdict.values
    if values["state"] == State.PENDING:
        values = {"cause": "", "settled_at": None, **values}
        values = _of_firing(row, values, now, settling.is_superseded(row, using))
    settling.compare_and_set(row, using, **values)
    return Kept(row, outcome, verdict)


def _keep_of_step(
    policy: TimeoutPolicy[Any], member: Member, outcome: Outcome | Fired, now: datetime, using: str
) -> Kept | None:
    """Write what a step has returned, unless it has moved or cancelled its row itself."""
    row, given, obj = member.row, member.timeout, member.obj
    if isinstance(outcome, Fired):
        ended = Ended(RAN, given.step, outcome.reason)
        verdict, kept = Verdict(steps.values_after(policy, given, obj, now, ended), ended=ended), None
    else:
        verdict = of_step(policy, given, _verdict(policy, given, outcome, now, obj), now, obj)
        if verdict.error is not None and not isinstance(verdict.error, GiveUp):
            raise verdict.error
        if verdict.ended is None:  # it snoozes: it is next again
            again = {name: getattr(given, name) for name in ("step", "steps_over", *columns.ATTEMPTS)}
            verdict = verdict._replace(values={**again, **verdict.values, "attempts": given.attempts - 1})
        kept = None if verdict.ended else Kept(row, outcome, verdict)
    if settling.compare_and_set(row, using, **verdict.values):
        steps.note(row, verdict.ended)
    return kept


def log_kept(kept: Kept, now: datetime, call: Call) -> None:
    """Log an outcome that a handler has returned, after its transaction has committed."""
    _log(kept.row, kept.outcome, kept.verdict, now, call)


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


def _log(row: Timeout, error: BaseException, verdict: Verdict | None, now: datetime, call: Call) -> None:
    if verdict is not None and verdict.error is not None:
        log_failure(row, verdict.error, now, call, is_recorded=True)
    elif verdict is not None and isinstance(error, Snooze) and row.state == State.PENDING:
        log_snooze(row, now, message_of(error, row) if error.reason else "", call)
    elif not isinstance(error, WorkerDied | Outcome | TransientFailure):  # the worker that recorded a death logs it
        log_failure(row, error, now, call, is_recorded=False)


def _is_unchanged(row: Timeout, seen: dict[str, Any] | None, now: datetime) -> bool:
    if seen is None:
        return row.state == State.PENDING and row.run_at <= now
    return all(getattr(row, name) == value for name, value in seen.items())


def _verdict(policy: TimeoutPolicy[Any] | None, row: Timeout, error: BaseException, now: datetime, obj: Any) -> Verdict:
    """Return what `error` means for a row that was not changed meanwhile, and its object `obj`."""
    attempt = row.attempts + (row.state == State.PENDING)

    def settled(state: Timeout.State, cause: Timeout.Cause, reason: str) -> dict[str, Any]:
        return {**columns.settled(state, cause, now), "reason": clipped(reason), "attempts": attempt}

    if isinstance(error, TransientFailure):
        return Verdict({**columns.waiting(now + error.wait), "attempts": attempt - 1})
    if isinstance(error, Skip):
        return Verdict(settled(State.SKIPPED, Cause.HANDLER, error.reason))
    if isinstance(error, GiveUp):
        return Verdict(settled(State.DEAD, Cause.HANDLER, error.reason), error=error)
    if isinstance(error, Snooze):
        number, most = row.snoozes + 1, policy.limits.snoozes if policy and policy.limits else None
        try:
            until = error.delay.due_from(now, obj)
        except Exception as wrong:  # noqa: BLE001 - a span of the application, or one that did not call `__init__`
            error = wrong
        else:
            if most is not None and number > most:
                why = f": {error.reason}" if error.reason else "."
                words = f"It snoozed {plural(number, 'time')}, and its policy allows {most}{why}"
                return Verdict(settled(State.DEAD, Cause.LIMIT, words), error=GiveUp(words))
            snoozed = with_event(row, "snoozed", now, reason=error.reason, to=until, number=number, step=row.step)
            values = {**columns.waiting(until), "ready_at": until, "attempts": attempt - 1, "history": snoozed}
            return Verdict({**values, "snoozes": number, "is_requested": False})
    delay = ((policy.retry if policy else None) or get_settings().retry).delay_after(attempt)
    run_at = None if delay is None else now + delay
    failed: dict[str, Any] = {"first_failed_at": row.first_failed_at or now, "last_failed_at": now}
    failed["history"] = with_event(
        row, "failed", now, attempt=attempt, to=run_at, step=row.step, **error_details(error, row)
    )
    if run_at is None:
        reason = f"{type(error).__name__}: {message_of(error, row)}"
        return Verdict({**settled(State.DEAD, Cause.RETRIES, reason), **failed}, error)
    return Verdict({**columns.waiting(run_at), "attempts": attempt, **failed}, error)


def of_step(policy: TimeoutPolicy[Any], row: Timeout, verdict: Verdict, now: datetime, obj: Any) -> Verdict:
    """Return what a verdict means for a row whose step was tried: what would settle it ends the step only.

    A retry and a snooze do not delay what follows: when that is due, the step that still waits is passed.
    """
    values = verdict.values
    if values["state"] == State.PENDING:
        following_at = policy.opening(following(row, policy, obj)[0].at, obj)
        return verdict._replace(values={**values, "run_at": min(values["run_at"], following_at)})
    tried = copy.copy(row)
    vars(tried).update(values, step=row.step)  # with the event of this attempt
    ended = Ended(DEAD if values["state"] == State.DEAD else SKIPPED, row.step, values.get("reason", ""))
    return Verdict(steps.values_after(policy, tried, obj, now, ended), verdict.error, ended)


def verdict_of_death(row: Timeout, now: datetime) -> Verdict:
    """Return what it means for a row that its process has died: pending again as a suspect, or dead.

    Beside others it is suspected only: any of them may be the cause. No attempt is counted, as the handler has not
    failed.
    """
    deaths = row.deaths + (row.suspected_at is not None)
    values = {"attempts": row.attempts - (row.state == State.FIRING), "deaths": deaths, "suspected_at": now}
    values["history"] = with_event(row, "suspected", now, number=deaths)
    if deaths < MAX_DEATHS:  # the claim is that of this worker, which tries it now
        return Verdict({**columns.waiting(now), **values, "claims": row.claims, "claimed_until": row.claimed_until})
    return Verdict({**values, **columns.settled(State.DEAD, Cause.RETRIES, now), "reason": DIED}, WorkerDied(DIED))


def _of_firing(row: Timeout, values: dict[str, Any], now: datetime, is_superseded: bool) -> dict[str, Any]:
    """Adapt the `values` of a verdict to a row whose handler ran outside a transaction, while others could change it.

    A cancel meanwhile was promised that there is no further attempt. A new schedule made the next round, which
    replaces this one, even if it has ended.
    """
    state, kept = values["state"], {name: value for name, value in values.items() if name in ("attempts", "history")}
    kept["reason"] = ""  # that of its end is its cause
    if state != State.SKIPPED and row.final_attempt:
        values = {**columns.settled(State.CANCELLED, Cause.HAND, now), **kept}
    elif state == State.PENDING and is_superseded:
        values = {**columns.settled(State.SKIPPED, Cause.SUPERSEDED, now), **kept}
    if values["state"] != State.PENDING:
        values["run_at"] = min(row.run_at, now)  # not the end of the lease: no attempt follows
    return values


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
