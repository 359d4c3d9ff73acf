"""After a handler raised and its work is undone: a second, short transaction says what becomes of the timeout."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError

from django_delayq import signals
from django_delayq.conf import get_settings
from django_delayq.exceptions import InvalidDelay
from django_delayq.firing.calling import firing_transaction
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.report import Findings
from django_delayq.ledger import settling
from django_delayq.ledger.history import appended, clipped, error_details, event, message_of
from django_delayq.ledger.scrubbing import shown
from django_delayq.models import Timeout
from django_delayq.outcomes import GiveUp, Outcome, Skip, Snooze

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from django.dispatch import Signal

    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause


class WorkerDied(Exception):
    """The process that ran this attempt died, or was cut off for longer than its lease."""


class Trouble(Exception):
    """The database was in trouble while an `atomic=False` handler ran: again soon, no attempt is counted."""

    def __init__(self, why: str, wait: timedelta) -> None:
        super().__init__(why)
        self.wait = wait


@dataclass(slots=True)
class _Verdict:
    """What becomes of a row: its columns, an event for its history, the signal to send, and the error to log."""

    values: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    signal: Signal | None = None
    error: BaseException | None = None


def record(
    policy: TimeoutPolicy[Any] | None,
    timeout_id: int,
    error: BaseException,
    using: str,
    *,
    seen: dict[str, Any] | None,
    charged: bool = False,
) -> Findings:
    """What `error` means for the timeout is committed, unless somebody moved, cancelled or tried it meanwhile.

    Args:
        policy: None: not declared here any more; the default ladder applies.
        timeout_id: whose.
        error: what the handler raised: an outcome, or a failure.
        using: the database.
        seen: what the row said when it was fired; None: it was not read, and must be due still.
        charged: this attempt is among the row's `attempts` already.
    """
    try:
        return _record(policy, timeout_id, error, using, seen=seen, charged=charged)
    except IntegrityError:  # a newer round took the slot in this very moment
        return _record(policy, timeout_id, error, using, seen=seen, charged=charged, superseded=True)


def _record(
    policy: TimeoutPolicy[Any] | None,
    timeout_id: int,
    error: BaseException,
    using: str,
    *,
    seen: dict[str, Any] | None,
    charged: bool,
    superseded: bool = False,
) -> Findings:
    findings, verdict, is_recorded = Findings(), None, False
    reach("undone")
    with firing_transaction(using):
        rows, now = settling.lock_rows([timeout_id], using, history=True)
        findings.now, row = now, rows.get(timeout_id)
        if row is None:
            findings.put_back([timeout_id], using, "others hold its row")
            return findings
        if _is_unchanged(row, seen, now):
            verdict = _verdict(policy, row, error, now, charged=charged)
            if row.state == State.FIRING:
                taken = superseded or settling.slot_is_taken(row, policy.labels if policy else (), using)
                verdict = _of_firing(row, verdict, now, slot_is_taken=taken)
                if verdict.values["state"] != State.PENDING:
                    verdict.values["run_at"] = min(row.run_at, now)  # not the end of the lease: nothing runs then
            if verdict.events:
                verdict.values["history"] = appended(row.history, *verdict.events)
            is_recorded = settling.compare_and_set(row, using, **verdict.values)
            if is_recorded and verdict.signal:
                findings.news.append((verdict.signal, row))
    reach("recorded")
    if verdict is not None and is_recorded:
        _log(row, verdict.error)
    elif not isinstance(error, WorkerDied | Outcome | Trouble):  # every worker looks for the dead, and one has logged
        _log(row, error)
    if row.is_settled:
        findings.done.append(row.pk)
    else:
        findings.again[row.pk] = row.run_at
    return findings


def _is_unchanged(row: Timeout, seen: dict[str, Any] | None, now: datetime) -> bool:
    if seen is None:
        return row.state == State.PENDING and row.run_at <= now
    return all(getattr(row, name) == value for name, value in seen.items())


def _verdict(
    policy: TimeoutPolicy[Any] | None, row: Timeout, error: BaseException, now: datetime, *, charged: bool
) -> _Verdict:
    """What `error` means for a row that nobody touched meanwhile."""
    attempt = row.attempts if charged else row.attempts + 1
    counted = {"attempts": attempt}
    if isinstance(error, Snooze):
        try:
            run_at = error.delay.due_from(now)
        except InvalidDelay as too_far:
            return _failure(policy, row, too_far, now, attempt)
        snoozed = event("snoozed", now, reason=error.reason, to=run_at)
        return _Verdict({**settling.waiting(run_at), "attempts": attempt - 1}, [snoozed])
    if isinstance(error, Trouble):
        return _Verdict({**settling.waiting(now + error.wait), "attempts": attempt - 1})
    if isinstance(error, Skip):
        values = {**settling.settled(State.SKIPPED, Cause.HANDLER, now), "reason": clipped(error.reason)}
        return _Verdict({**values, **counted}, [], signals.timeout_skipped)
    if isinstance(error, GiveUp):
        values = {**settling.settled(State.DEAD, Cause.HANDLER, now), "reason": clipped(error.reason)}
        return _Verdict({**values, **counted}, [], signals.timeout_dead, error)
    return _failure(policy, row, error, now, attempt)


def _failure(
    policy: TimeoutPolicy[Any] | None, row: Timeout, error: BaseException, now: datetime, attempt: int
) -> _Verdict:
    """The next step of the ladder, or the end of it."""
    ladder = (policy.retry if policy else None) or get_settings().retry
    delay = ladder.delay_after(attempt)
    if delay is None:
        failed = event("failed", now, attempt=attempt, **error_details(error, row))
        reason = clipped(f"{type(error).__name__}: {message_of(error, row)}")
        values = {**settling.settled(State.DEAD, Cause.RETRIES, now), "reason": reason, "attempts": attempt}
        return _Verdict(values, [failed], signals.timeout_dead, error)
    run_at = now + delay
    failed = event("failed", now, attempt=attempt, to=run_at, **error_details(error, row))
    return _Verdict({**settling.waiting(run_at), "attempts": attempt}, [failed], signals.timeout_failed, error)


def _of_firing(row: Timeout, verdict: _Verdict, now: datetime, *, slot_is_taken: bool) -> _Verdict:
    """`verdict` as it holds for a row whose handler ran outside a transaction, while others could act.

    Whoever cancelled it meanwhile was promised that there is no further attempt; whoever scheduled anew
    made the next round, and at most one may wait.
    """
    if verdict.values["state"] == State.SKIPPED:
        return verdict
    attempts = {"attempts": verdict.values["attempts"]}
    if row.final_attempt:
        values = settling.settled(State.CANCELLED, Cause.HAND, now)
        return _Verdict({**values, **attempts}, verdict.events, signals.timeout_cancelled, verdict.error)
    if verdict.values["state"] == State.PENDING and slot_is_taken:
        values = settling.settled(State.SKIPPED, Cause.SUPERSEDED, now)
        return _Verdict({**values, **attempts}, verdict.events, signals.timeout_skipped, verdict.error)
    return verdict


def _log(row: Timeout, error: BaseException | None) -> None:
    """Log a failed attempt as a warning, and a dead timeout as an error; None: the attempt did not fail."""
    if error is None:
        return
    extra = {"timeout_id": row.pk, "policy": row.policy}
    words = message_of(error, row)
    if isinstance(error, GiveUp):
        logger.error(
            "Timeout %s (%s) is dead: its handler gave up at attempt %s: %s",
            row.pk,
            row.policy,
            row.attempts,
            words,
            extra={"event": "timeout_dead", **extra},
        )
    elif row.state == State.DEAD:
        logger.error(
            "Timeout %s (%s) is dead: attempt %s failed, and none is left: %s: %s",
            row.pk,
            row.policy,
            row.attempts,
            type(error).__name__,
            words,
            exc_info=shown(error, row),
            extra={"event": "timeout_dead", **extra},
        )
    else:
        logger.warning(
            "Timeout %s (%s) failed at attempt %s and is %s now: %s: %s",
            row.pk,
            row.policy,
            row.attempts,
            row.state,
            type(error).__name__,
            words,
            exc_info=shown(error, row),
            extra={"event": "timeout_failed", **extra},
        )
