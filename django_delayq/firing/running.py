"""Run one piece of work in this thread."""

from __future__ import annotations

from django_delayq.firing.checkpoints import reach
from django_delayq.firing.groups import fire_in_groups
from django_delayq.firing.handler import guarded
from django_delayq.firing.long_runs import tracked
from django_delayq.firing.non_atomic import fire_non_atomic
from django_delayq.firing.poison import fire_suspect
from django_delayq.firing.report import Report, ReportBuilder, Work
from django_delayq.firing.state import firing_state
from django_delayq.firing.unknown import unknown
from django_delayq.ledger.controls import stop_cache
from django_delayq.policies import registry


def run(work: Work, using: str) -> Report:
    """Fire, skip, record as failed or release every timeout of `work`, and report which.

    Call it outside a transaction, in any thread. It raises nothing for what handlers do or databases suffer. Only
    KeyboardInterrupt passes, after the interrupted transaction has rolled back. It does not acknowledge in Redis.
    """
    report = ReportBuilder()
    with tracked(work):
        guarded(
            lambda: _fire(work, using, report),
            lambda error: report.release_unknown(work.policy, work.ids, error, using),
        )
    for timeout_id in work.ids:
        if timeout_id not in report.uncounted:
            firing_state.backoff.reset(using, timeout_id)
    report.send_signals(using)
    reach("reported")
    return report.report()


def _fire(work: Work, using: str, report: ReportBuilder) -> None:
    policy = registry.get(work.policy)
    candidates = work.candidates()
    if policy is None:
        now = report.current_time()
        report.again.update((id, unknown.again_at(work.policy, id, now)) for id in work.ids)
    elif stopped := stop_cache.confirmed(using, [policy.label]):  # while the work waited for a thread
        report.release_rest(work.ids, stopped.recheck_at(policy.label, report.current_time()))
    elif not policy.atomic:
        for candidate in candidates:
            report.add(fire_non_atomic(policy, candidate, using))
    elif work.suspect:
        for candidate in candidates:
            report.add(fire_suspect(policy, candidate, using))
    else:
        fire_in_groups(policy, candidates, using, report)
