"""Fire a suspect, a timeout that a process may have died of, alone, and count its attempt before it runs.

Two deliveries make a suspect: of a hundred timeouts that a dying process held, one may have killed it. Counting first
and firing alone finds that one, and counts no attempt for the others.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime
from typing import Any

from django.db.utils import Error

from django_delayq.conf import get_settings
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.failures import WorkerDied, record
from django_delayq.firing.groups import fire_one
from django_delayq.firing.handler import firing_transaction
from django_delayq.firing.report import Candidate, ReportBuilder
from django_delayq.ledger import settling
from django_delayq.ledger.history import appended, event
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
State = Timeout.State

_UNCOUNT_TRIES, _UNCOUNT_PAUSE_SECONDS = 50, 0.02


def fire_suspect(policy: TimeoutPolicy[Any], candidate: Candidate, using: str) -> ReportBuilder:
    """Fire the timeout alone, with its attempt counted beforehand. It is `dead` if no attempt is left."""
    report, timeout_id, is_counted, seen = ReportBuilder(), candidate.id, False, None
    with firing_transaction(using):
        rows, now = settling.lock_rows([timeout_id], using, history=True)
        row, report.now = rows.get(timeout_id), now
        if row is None:
            report.release([timeout_id], using, "another transaction has locked its row")
            return report
        is_meant = row.policy in policy.labels and row.object_id == candidate.object_id
        if row.state == State.PENDING and row.run_at <= now and is_meant:  # else `fire_one` reports why it does not run
            # An attempt that was counted less than a lease ago, with unknown outcome, may be about to run. Redis gives
            # an entry to one worker at a time, but a forged entry can reach several, each as a suspect; the second of
            # them would find no attempt left.
            last = row.history[-1] if row.history else {}
            if last.get("what") == "suspected" and datetime.fromisoformat(last["at"]) + get_settings().lease > now:
                report.release([timeout_id], using, "another worker has just claimed it")
                return report
            if row.attempts and (policy.retry or get_settings().retry).delay_after(row.attempts) is None:
                seen = {"state": row.state, "attempts": row.attempts, "run_at": row.run_at}
            else:
                history = appended(row.history, event("suspected", now, attempt=row.attempts + 1))
                is_counted = settling.compare_and_set(row, using, attempts=row.attempts + 1, history=history)
    if seen is not None:  # no attempt is left
        died = WorkerDied("The process died each time that this timeout was fired.")
        return record(policy, timeout_id, died, using, seen=seen, is_counted=True)
    reach("charged")
    report = fire_one(policy, candidate, using, is_counted=is_counted)
    if is_counted and timeout_id in report.uncounted:
        _uncount(timeout_id, using)
    return report


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
