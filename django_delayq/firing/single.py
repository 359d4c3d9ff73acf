"""Fire one timeout alone, in a transaction of its own, and say what becomes of it if that fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from django_delayq.firing.attempt import Attempt, LostRace, handle_each
from django_delayq.firing.expiry import settle_dead_attempts
from django_delayq.firing.failures import record
from django_delayq.firing.pace import pace_of
from django_delayq.firing.patience import TROUBLE_CEILING
from django_delayq.firing.report import Findings
from django_delayq.ledger.db_errors import trouble_of
from django_delayq.ledger.scrubbing import message_of, shown
from django_delayq.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_delayq.firing.report import Candidate
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")


def fire_one(
    policy: TimeoutPolicy[Any],
    candidate: Candidate,
    using: str,
    handle: Callable[[Attempt], None] = handle_each,
    *,
    charged: bool = False,
) -> Findings:
    """The timeout is fired, or its failed attempt recorded, or it is put back; `charged`: the attempt is counted."""
    attempt = Attempt(policy, [candidate], using, charged)
    try:
        attempt.run(handle)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - also SystemExit: a handler must not end the worker
        return _after(attempt, error)
    return concluded(attempt)


def concluded(attempt: Attempt) -> Findings:
    """What a committed attempt found, and what is to be done besides."""
    if attempt.ready:
        pace_of(attempt.policy.label).went_well(len(attempt.ready), attempt.seconds)
    if attempt.expired:
        try:
            attempt.findings.add(settle_dead_attempts(attempt.using, len(attempt.expired), attempt.expired))
        except Exception as error:  # noqa: BLE001 - what is committed above must be reported
            _cannot_write(attempt.expired, error, attempt.using, attempt.findings)
    return attempt.findings


def trouble_with(attempt: Attempt, error: BaseException) -> Findings | None:
    """All candidates put back for a while, if `error` is nobody's fault; else None."""
    if isinstance(error, Outcome):
        return None
    findings = Findings(now=attempt.findings.now)
    ids = [candidate.id for candidate in attempt.candidates]
    if isinstance(error, LostRace):
        findings.put_back(ids, attempt.using, "the database's clock went back")
        return findings
    trouble = trouble_of(error, attempt.using, attempt.watch, attempt.link)
    if trouble is None:
        return None
    findings.put_back(ids, attempt.using, trouble, TROUBLE_CEILING)
    return findings


def _after(attempt: Attempt, error: BaseException) -> Findings:
    put_back = trouble_with(attempt, error)
    if put_back is not None:
        return put_back
    pace_of(attempt.policy.label).was_undone(attempt.seconds)
    [candidate] = attempt.candidates
    seen = attempt.turn.seen if attempt.turn else None
    try:
        return record(attempt.policy, candidate.id, error, attempt.using, seen=seen, charged=attempt.charged)
    except Exception as recording:  # noqa: BLE001 - one that cannot be recorded must not hide what became of others
        findings = Findings()
        _cannot_write([candidate.id], recording, attempt.using, findings)
        return findings


def _cannot_write(ids: list[int], error: Exception, using: str, findings: Findings) -> None:
    """What became of `ids` could not be written: they come again."""
    trouble = trouble_of(error, using)
    logger.warning(
        "What became of timeouts %s could not be written: %s",
        ids,
        trouble or message_of(error),
        exc_info=None if trouble else shown(error),
        extra={"event": "timeouts_put_back"},
    )
    findings.put_back(ids, using, trouble or f"{type(error).__name__}: {message_of(error)}", TROUBLE_CEILING)
