"""Fire with `atomic=False`: the handler runs outside a transaction, between two short ones, at least once.

The first transaction locks, checks and marks the row `firing`, with an expiry and the attempt counted. The second one
settles it. A process that dies between the two leaves a row that expires. Its slot is free meanwhile, so that a next
round can be scheduled.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from django_delayq import signals
from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.firing.attempt import Attempt, LostRace
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.failures import TransientFailure, record, settle_dead_attempts
from django_delayq.firing.handler import call_handler, firing_transaction, guarded
from django_delayq.firing.members import Member
from django_delayq.firing.rails import count_fired
from django_delayq.firing.report import Candidate, Report, ReportBuilder
from django_delayq.firing.state import TRANSIENT_MAX_SECONDS, Call, firing_state
from django_delayq.ledger import settling
from django_delayq.ledger.db_errors import driver_connection_of, transient_reason
from django_delayq.models import Timeout
from django_delayq.outcomes import Outcome
from django_delayq.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause

_SETTLE_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 5, 8, 10)
"""The work of the handler cannot be rolled back, so its settling is tried for half a minute."""


class _MarkFiring(Attempt):
    """The first transaction: mark the row `firing` instead of `fired`, and call no handler."""

    def _mark(self, members: Sequence[Member], now: datetime) -> None:
        for member in members:
            if not settling.mark_firing(member.row, now + get_settings().lease, self.using):
                raise LostRace

    def _call(self) -> None:
        """Do nothing: the handler runs after the commit."""


def fire_non_atomic(policy: TimeoutPolicy[Any], candidate: Candidate, using: str) -> ReportBuilder:
    """Run the handler and settle the row, or record its failed attempt, or release it."""
    attempt = _MarkFiring(policy, [candidate], using)
    report = attempt.fire(lambda error: record(policy, candidate.id, error, using, seen=None))
    if attempt.is_committed:
        for member in attempt.ready:
            report.add(_run_handler(policy, member.row, member.obj, using, report))
        count_fired(policy, len(report.fired), attempt.guards, using)
    return report


def extend_firing(ids: Collection[int], using: str) -> None:
    """Extend the expiry of those of `ids` that are `firing` to one `LEASE` from now: their worker is running."""
    if ids:
        settling.extend(ids, database_now(using) + get_settings().lease, using)


def settle_expired(using: str, limit: int = 1000) -> Report:
    """Settle rows whose `firing` expired as after any failed attempt: pending again, dead, cancelled or superseded.

    At most `limit`, the longest expired first. Any number of workers may do so at once. Raises the errors of the
    database.
    """
    report = settle_dead_attempts(using, limit)
    report.publish(using)
    return report.report()


def _run_handler(
    policy: TimeoutPolicy[Any], row: Timeout, obj: Any, using: str, marked: ReportBuilder
) -> ReportBuilder:
    """Call the handler, and settle the row or record its failed attempt. `marked`: of the transaction before it."""
    seen = {"state": State.FIRING, "attempts": row.attempts}
    driver_connection, call = driver_connection_of(using), Call((row.pk,), seen, is_counted=True)

    def failed(error: BaseException) -> ReportBuilder:
        reason = None if isinstance(error, Outcome) else transient_reason(error, using, None, driver_connection)
        if reason is not None:
            wait = firing_state.backoff.next_wait(using, row.pk, reason, TRANSIENT_MAX_SECONDS)
            error = TransientFailure(reason, wait)
        options: dict[str, Any] = {"seen": seen, "is_counted": True, "took": time.monotonic() - call.began}
        return persistently(lambda: record(policy, row.pk, error, using, **options), row.pk, using)

    try:
        report = guarded(lambda: call_handler(policy, obj, row, call), failed)
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):
            interrupted = TransientFailure("interrupted", timedelta(0))
            record(policy, row.pk, interrupted, using, seen=seen, is_counted=True)
        raise
    if report is None:  # the handler returned
        reach("handled")
        marked.note_call(call)
        report = persistently(lambda: _settle(row, using), row.pk, using)
        reach("settled")
    return report


def persistently(settle: Callable[[], ReportBuilder], timeout_id: int, using: str) -> ReportBuilder:
    """Return what `settle` returns, and repeat it while the row is locked or the database fails.

    If it never succeeds, the handler runs again; with `atomic=False` when the row expires.
    """
    for pause in _SETTLE_PAUSES_SECONDS:
        try:
            report = settle()
            if timeout_id not in report.uncounted:
                return report
        except Exception as error:
            if transient_reason(error, using) is None:
                raise
        time.sleep(pause)
    return settle()


def _settle(fired: Timeout, using: str) -> ReportBuilder:
    """Mark the row as fired, unless it was settled, or a new attempt or round of it has begun."""
    report = ReportBuilder()
    with firing_transaction(using):
        rows, now = settling.lock_rows([fired.pk], using)
        row, report.now = rows.get(fired.pk), now
        if row is None:
            report.release([fired.pk], using, "another transaction has locked its row")
            return report
        # It may be pending again, because it expired although this process was running. Its work is done, so it need
        # not be done again.
        unchanged = ("attempts", "idempotency_key", "due_at")
        is_same_attempt = not row.is_settled and all(getattr(row, name) == getattr(fired, name) for name in unchanged)
        # While it was firing, `run_at` was the end of the lease. No attempt follows any more.
        values = {**settling.settled(State.FIRED, Cause.DUE, now), "run_at": min(row.run_at, now)}
        if is_same_attempt and settling.compare_and_set(row, using, **values):
            report.fired.append(row.pk)
            report.signals.append((signals.timeout_fired, row))
    report.add_row(row)
    return report
