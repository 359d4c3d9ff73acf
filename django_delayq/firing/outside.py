"""`atomic=False`: the handler runs outside a transaction, between two short ones, at least once.

The first transaction locks, checks and marks the row `firing`, with an expiry and the attempt counted; the
second settles it. A process that dies between the two leaves a row that expires (see `expiry`). The slot is
free meanwhile, so that a next round can be scheduled.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django_delayq import signals
from django_delayq.conf import get_settings
from django_delayq.firing.attempt import Attempt, LostRace
from django_delayq.firing.calling import call, firing_transaction
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.failures import Trouble, record
from django_delayq.firing.patience import TROUBLE_CEILING, patience
from django_delayq.firing.report import Findings
from django_delayq.firing.single import concluded, trouble_with
from django_delayq.ledger import settling
from django_delayq.ledger.db_errors import link_of, trouble_of
from django_delayq.models import Timeout
from django_delayq.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_delayq.firing.report import Candidate
    from django_delayq.firing.taking import Member, Taken
    from django_delayq.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause

# What the handler did cannot be undone, so its settling is worth some patience: half a minute in all.
_PAUSES = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 5, 8, 10)


class _TakeOut(Attempt):
    """The first transaction: marks `firing` instead of `fired`, and calls no handler."""

    def _mark(self, taken: Taken) -> None:
        for member in taken.ready:
            if not settling.mark_firing(member.row, taken.now + get_settings().lease, self.using):
                raise LostRace
            self.ready.append(member)

    def _handle(self, handle: Callable[[Attempt], None]) -> None:
        """Nothing: the handler runs when this is committed."""


def fire_outside(policy: TimeoutPolicy[Any], candidate: Candidate, using: str) -> Findings:
    """The handler has run and the row is settled, or its failed attempt recorded, or it is put back."""
    attempt = _TakeOut(policy, [candidate], using)
    try:
        attempt.run(lambda _: None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - before the handler ran: the condition, or the database
        return trouble_with(attempt, error) or record(policy, candidate.id, error, using, seen=None)
    members, attempt.ready = attempt.ready, []
    findings = concluded(attempt)
    for member in members:
        findings.add(_handle(policy, member, using))
    return findings


def _handle(policy: TimeoutPolicy[Any], member: Member, using: str) -> Findings:
    seen = {"state": State.FIRING, "attempts": member.row.attempts}

    def failed(error: BaseException) -> Findings:
        return record(policy, member.row.pk, error, using, seen=seen, charged=True)

    link = link_of(using)
    try:
        call(policy, member.obj, member.row)
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):
            failed(Trouble("interrupted", timedelta(0)))
        raise
    except BaseException as error:  # noqa: BLE001 - also SystemExit: a handler must not end the worker
        judged = _judged(error, member, using, link)
        return _persistently(lambda: failed(judged), member, using)
    reach("handled")
    findings = _persistently(lambda: _settle(member, using), member, using)
    reach("settled")
    return findings


def _judged(error: BaseException, member: Member, using: str, link: object) -> BaseException:
    """`error`, or `Trouble` if the database was to blame for it."""
    why = None if isinstance(error, Outcome) else trouble_of(error, using, link=link)
    if why is None:
        return error
    return Trouble(why, patience.wait(using, member.row.pk, why, TROUBLE_CEILING))


def _persistently(settle: Callable[[], Findings], member: Member, using: str) -> Findings:
    """What `settle` finds, tried anew for a while if the row is locked or the database in trouble.

    If it never succeeds, the row expires, and the handler will run again.
    """
    for pause in _PAUSES:
        try:
            findings = settle()
            if member.row.pk not in findings.blameless:
                return findings
        except Exception as error:
            if trouble_of(error, using) is None:
                raise
        time.sleep(pause)
    return settle()


def _settle(member: Member, using: str) -> Findings:
    """The row is `fired`, unless somebody settled it, or began a new attempt or round of it."""
    row_id, findings = member.row.pk, Findings()
    with firing_transaction(using):
        rows, now = settling.lock_rows([row_id], using)
        row, findings.now = rows.get(row_id), now
        if row is None:
            findings.put_back([row_id], using, "others hold its row")
            return findings
        # While it was firing, `run_at` was the end of the lease. Nothing will run then any more.
        values = {**settling.settled(State.FIRED, Cause.DUE, now), "run_at": min(row.run_at, now)}
        if _is_same_attempt(row, member.row) and settling.compare_and_set(row, using, **values):
            findings.fired.append(row_id)
            findings.news.append((signals.timeout_fired, row))
    if row.is_settled:
        findings.done.append(row_id)
    else:
        findings.again[row_id] = row.run_at
    return findings


def _is_same_attempt(row: Timeout, ours: Timeout) -> bool:
    """Whether nobody began anything new with the row.

    It may be waiting again: put back when it expired, although we live. What we did is done, so it need not be
    done once more.
    """
    names = ("attempts", "idempotency_key", "due_at")
    return not row.is_settled and all(getattr(row, name) == getattr(ours, name) for name in names)
