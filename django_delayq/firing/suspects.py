"""Poison: a timeout that a process may have died of is fired alone, after its attempt has been counted.

Two deliveries make a suspect, not a culprit: of a hundred timeouts that a dying process held, one killed it.
Counting first and firing alone finds that one, and charges none of the others for its deeds.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db.utils import Error

from django_delayq import signals
from django_delayq.conf import get_settings
from django_delayq.firing.attempt import handle_each
from django_delayq.firing.calling import firing_transaction
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.failures import WorkerDied
from django_delayq.firing.report import Findings
from django_delayq.firing.single import fire_one
from django_delayq.ledger import settling
from django_delayq.ledger.history import appended, error_details, event
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_delayq.firing.attempt import Attempt
    from django_delayq.firing.report import Candidate
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause

_PATIENCE, _PAUSE_SECONDS = 50, 0.02
"""How often and after which pause an attempt is given back of a row that others hold for a moment."""


def fire_suspect(
    policy: TimeoutPolicy[Any], candidate: Candidate, using: str, handle: Callable[[Attempt], None] = handle_each
) -> Findings:
    """The timeout is fired alone with its attempt counted beforehand; `dead` if no attempt is left."""
    findings, charged = _charge(policy, candidate, using)
    if findings is not None:
        return findings
    reach("charged")
    findings = fire_one(policy, candidate, using, handle, charged=charged)
    if charged and candidate.id in findings.blameless:
        _give_back(candidate.id, using)
    return findings


def _is_meant(row: Timeout, policy: TimeoutPolicy[Any], candidate: Candidate) -> bool:
    """Whether the work that names this row is neither forged nor stale."""
    return row.policy in policy.labels and row.object_id == candidate.object_id


def _charge(policy: TimeoutPolicy[Any], candidate: Candidate, using: str) -> tuple[Findings | None, bool]:
    """What there is to report if it must not run; else None and whether an attempt was counted."""
    findings, timeout_id = Findings(), candidate.id
    with firing_transaction(using):
        rows, now = settling.lock_rows([timeout_id], using, history=True)
        row, findings.now = rows.get(timeout_id), now
        if row is None:
            findings.put_back([timeout_id], using, "others hold its row")
            return findings, False
        if row.state != State.PENDING or row.run_at > now or not _is_meant(row, policy, candidate):
            return None, False  # nothing will run: the usual look says why
        if _is_taken_up(row, now):
            findings.put_back([timeout_id], using, "somebody has just taken it up")
            return findings, False
        if not _attempts_left(policy, row):
            _bury(row, now, using)
            findings.done.append(timeout_id)
            findings.news.append((signals.timeout_dead, row))
            return findings, False
        history = appended(row.history, event("suspected", now, attempt=row.attempts + 1))
        settling.compare_and_set(row, using, attempts=row.attempts + 1, history=history)
    return None, True


def _is_taken_up(row: Timeout, now: datetime) -> bool:
    """Whether somebody counted an attempt less than a lease ago of which nothing is known yet.

    It may be about to run. Redis gives an entry to one worker at a time, but whoever can write to it can give it to
    several, as if all of them had died of it; and the second of them would find no attempt left of a single one.
    """
    last = row.history[-1] if row.history else {}
    return last.get("what") == "suspected" and datetime.fromisoformat(last["at"]) + get_settings().lease > now


def _attempts_left(policy: TimeoutPolicy[Any], row: Timeout) -> bool:
    ladder = policy.retry or get_settings().retry
    return row.attempts == 0 or ladder.delay_after(row.attempts) is not None


def _bury(row: Timeout, now: datetime, using: str) -> None:
    """All attempts were counted, and none came back: the row is `dead`, and says that its process died."""
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


def _give_back(timeout_id: int, using: str) -> None:
    """Its handler could not even begin, or was undone through nobody's fault: the attempt does not count."""
    try:
        for _ in range(_PATIENCE):
            with firing_transaction(using):
                rows, _now = settling.lock_rows([timeout_id], using, history=True)
                row = rows.get(timeout_id)
                if row is not None:
                    if row.state == State.PENDING and row.history and row.history[-1].get("what") == "suspected":
                        settling.compare_and_set(row, using, attempts=row.attempts - 1, history=row.history[:-1])
                    return
            time.sleep(_PAUSE_SECONDS)
    except Error:
        logger.warning("Timeout %s keeps an attempt counted that did not run: the database failed", timeout_id)
