"""Run one piece of work in this thread, come what may."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from django_delayq.firing.attempt import handle_each
from django_delayq.firing.batches import fire_batch, handle_batch
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.groups import fire_in_groups
from django_delayq.firing.long_runs import noted
from django_delayq.firing.outside import fire_outside
from django_delayq.firing.patience import TROUBLE_CEILING, patience
from django_delayq.firing.report import Findings, Report, Work
from django_delayq.firing.suspects import fire_suspect
from django_delayq.firing.unknown import unknown
from django_delayq.ledger.announcing import announce
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.db_errors import trouble_of
from django_delayq.ledger.scrubbing import message_of, shown
from django_delayq.policies import registry

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")


def run(work: Work, using: str) -> Report:
    """Every timeout of `work` is fired, skipped, recorded as failed, or put back; the report says which.

    Call it outside a transaction, in any thread. Raises nothing for what handlers do or databases suffer; only
    KeyboardInterrupt passes, when what it interrupted is undone. Does not acknowledge in Redis.
    """
    findings = Findings()
    try:
        with noted(work):
            _fire(work, using, findings)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a worker thread must survive whatever this is
        _put_back_the_rest(work, error, using, findings)
    for timeout_id in work.ids:
        if timeout_id not in findings.blameless:
            patience.forget(using, timeout_id)
    tell(findings, using)
    reach("reported")
    return findings.report()


def tell(findings: Findings, using: str) -> None:
    """The receivers of our signals know what was committed. Nothing that goes wrong here undoes it."""
    for signal, row in findings.news:
        try:
            announce(signal, row, using)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.error(
                "Nobody could be told what became of timeout %s (%s)", row.pk, row.state, exc_info=shown(error, row)
            )


def _fire(work: Work, using: str, findings: Findings) -> None:
    policy = registry.get(work.policy)
    candidates = work.candidates()
    if policy is None:
        now = findings.moment()
        findings.again.update((id, unknown.again_at(work.policy, id, now)) for id in work.ids)
    elif stopped := stop_cache.confirmed(using, [policy.label]):
        # Since it was planned: work may wait for a thread for longer than an operator waits for his pause.
        again = stopped.recheck_at(policy.label, findings.moment())
        findings.again.update(dict.fromkeys(work.ids, again))
        findings.blameless.update(work.ids)
    elif not policy.atomic:
        for candidate in candidates:
            findings.add(fire_outside(policy, candidate, using))
    elif work.suspect:
        for candidate in candidates:
            findings.add(fire_suspect(policy, candidate, using, _handle_of(policy)))
    elif policy.batch:
        fire_batch(policy, candidates, using, findings)
    else:
        fire_in_groups(policy, candidates, using, findings)


def _handle_of(policy: TimeoutPolicy[Any]) -> Any:
    return handle_batch if policy.batch else handle_each


def _put_back_the_rest(work: Work, error: BaseException, using: str, findings: Findings) -> None:
    """Nothing is known to have become of the others: they come again, ever more slowly."""
    rest = [timeout_id for timeout_id in work.ids if timeout_id not in findings.again]
    rest = [timeout_id for timeout_id in rest if timeout_id not in findings.done]
    trouble = trouble_of(error, using)
    logger.warning(
        "Timeouts %s of %s are put back: %s",
        rest,
        work.policy,
        trouble or message_of(error),
        exc_info=None if trouble else shown(error),
        extra={"event": "timeouts_put_back", "policy": work.policy},
    )
    findings.put_back(rest, using, trouble or f"{type(error).__name__}: {message_of(error)}", TROUBLE_CEILING)
