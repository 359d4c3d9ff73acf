"""Fire a suspect, a timeout that a process may have died of, alone, and count its attempt before it runs.

Two deliveries make a suspect: of a hundred timeouts that a dying process held, one may have killed it. Counting first
and firing alone finds that one, and counts no attempt for the others.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db.utils import Error

from django_delayq import signals
from django_delayq.conf import get_settings
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.failures import WorkerDied
from django_delayq.firing.groups import fire_one
from django_delayq.firing.handler import firing_transaction
from django_delayq.firing.report import ReportBuilder
from django_delayq.ledger import settling
from django_delayq.ledger.history import appended, error_details, event
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django_delayq.firing.report import Candidate
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause

_UNCOUNT_TRIES, _UNCOUNT_PAUSE_SECONDS = 50, 0.02


def fire_suspect(policy: TimeoutPolicy[Any], candidate: Candidate, using: str) -> ReportBuilder:
    """Fire the timeout alone, with its attempt counted beforehand. It is `dead` if no attempt is left."""
    report, is_counted = _count(policy, candidate, using)
    if report is not None:
        return report
    reach("charged")
    report = fire_one(policy, candidate, using, is_counted=is_counted)
    if is_counted and candidate.id in report.uncounted:
        _uncount(candidate.id, using)
    return report


def _count(policy: TimeoutPolicy[Any], candidate: Candidate, using: str) -> tuple[ReportBuilder | None, bool]:
    """Count an attempt. Return a report if the timeout must not run, and whether an attempt was counted."""
    report, timeout_id = ReportBuilder(), candidate.id
    with firing_transaction(using):
        rows, now = settling.lock_rows([timeout_id], using, history=True)
        row, report.now = rows.get(timeout_id), now
        if row is None:
            report.release([timeout_id], using, "another transaction has locked its row")
            return report, False
        is_stale = row.policy not in policy.labels or row.object_id != candidate.object_id
        if row.state != State.PENDING or row.run_at > now or is_stale:
            return None, False  # `fire_one` does not run it, and reports why
        # An attempt that was counted less than a lease ago, with unknown outcome, may be about to run. Redis gives an
        # entry to one worker at a time, but a forged entry can reach several, each as a suspect; the second of them
        # would find no attempt left.
        last = row.history[-1] if row.history else {}
        if last.get("what") == "suspected" and datetime.fromisoformat(last["at"]) + get_settings().lease > now:
            report.release([timeout_id], using, "another worker has just claimed it")
            return report, False
        if row.attempts and (policy.retry or get_settings().retry).delay_after(row.attempts) is None:
            _mark_dead(row, now, using)
            report.done.append(timeout_id)
            report.signals.append((signals.timeout_dead, row))
            return report, False
        history = appended(row.history, event("suspected", now, attempt=row.attempts + 1))
        settling.compare_and_set(row, using, attempts=row.attempts + 1, history=history)
    return None, True


def _mark_dead(row: Timeout, now: datetime, using: str) -> None:
    """Mark the row as dead: all attempts were counted, and no process survived one."""
    error = WorkerDied("The process died each time that this timeout was fired.")
    history = appended(row.history, event("failed", now, attempt=row.attempts, **error_details(error)))
    values = settling.settled(State.DEAD, Cause.RETRIES, now)
    settling.compare_and_set(row, using, **values, reason=f"{type(error).__name__}: {error}", history=history)
    logger.error(
        "Timeout %s (%s) is dead: the process died each of the %s times that it was fired",
        row.pk,
        row.policy,
        row.attempts,
        extra={"event": "timeout_dead", "timeout_id": row.pk, "policy": row.policy},
    )


def _uncount(timeout_id: int, using: str) -> None:
    """Undo the counting: the handler did not begin, or was rolled back for a reason outside of it."""
    try:
        for _ in range(_UNCOUNT_TRIES):
            with firing_transaction(using):
                row = settling.lock_rows([timeout_id], using, history=True)[0].get(timeout_id)
                if row is not None:
                    if row.state == State.PENDING and row.history and row.history[-1].get("what") == "suspected":
                        settling.compare_and_set(row, using, attempts=row.attempts - 1, history=row.history[:-1])
                    return
            time.sleep(_UNCOUNT_PAUSE_SECONDS)
    except Error:
        logger.warning("Timeout %s keeps an attempt counted that did not run: the database failed", timeout_id)
