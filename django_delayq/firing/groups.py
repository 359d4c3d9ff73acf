"""Fire several timeouts of one policy in one transaction: one lock, one compare-and-set, one COMMIT.

Handlers run without savepoints, which would cost as much as a transaction each. So a handler that raises, be it only an
outcome, rolls the whole group back, and its members are fired one by one. The same holds for a batch (`batch=n`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django_delayq.firing.attempt import Attempt
from django_delayq.firing.failures import record
from django_delayq.firing.report import Candidate, ReportBuilder
from django_delayq.firing.state import MAX_GROUP, WORK_SECONDS, firing_state
from django_delayq.policies import TimeoutPolicy

ALONE_AFTER_BATCH_SECONDS = 30.0


def fire_in_groups(
    policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str, report: ReportBuilder
) -> None:
    """Fire `candidates` in due order, in groups or batches.

    After a while the rest is released, so that other threads and workers can claim it, and a worker that stops need not
    finish it.
    """
    sizes = firing_state.group_size(policy.label)
    stop_at = time.monotonic() + 2 * WORK_SECONDS
    rest, locked_size = list(candidates), 0
    while rest:
        own_size = policy.batch if policy.batch and not sizes.is_alone else sizes.size()
        size = max(own_size, locked_size)
        group, rest = rest[:size], rest[size:]
        found = _fire_group(policy, group, using, stop_at)
        report.add(found)
        # Where all objects of a group are locked, the next ones most likely are too: find out in few steps.
        all_locked = len(found.uncounted) == len(group) and not policy.batch
        locked_size = min(MAX_GROUP, 4 * size) if all_locked else 0
        if time.monotonic() > stop_at:
            break
    report.release_rest((candidate.id for candidate in rest), report.current_time())


def _fire_group(policy: TimeoutPolicy[Any], group: Sequence[Candidate], using: str, stop_at: float) -> ReportBuilder:
    if len(group) == 1:
        return fire_one(policy, group[0], using)

    def fire_one_by_one(_: BaseException) -> ReportBuilder:
        if policy.batch:
            firing_state.group_size(policy.label).fire_alone_for(ALONE_AFTER_BATCH_SECONDS)
        report, rest = ReportBuilder(), list(group)
        while rest:
            report.add(fire_one(policy, rest.pop(0), using))
            if time.monotonic() > stop_at:
                break
        report.release_rest((candidate.id for candidate in rest), report.current_time())
        return report

    return Attempt(policy, group, using).fire(fire_one_by_one)


def fire_one(
    policy: TimeoutPolicy[Any], candidate: Candidate, using: str, *, is_counted: bool = False
) -> ReportBuilder:
    """Fire one timeout in a transaction of its own, and record the attempt if its handler fails.

    `is_counted`: an earlier transaction has counted the attempt.
    """
    attempt = Attempt(policy, [candidate], using, is_counted)

    def record_failure(error: BaseException) -> ReportBuilder:
        seen = attempt.turn.seen if attempt.turn else None
        try:
            return record(policy, candidate.id, error, using, seen=seen, is_counted=is_counted)
        except Exception as failure:  # noqa: BLE001 - the outcomes of other timeouts must be reported nevertheless
            report = ReportBuilder()
            report.release_unknown(policy.label, [candidate.id], failure, using)
            return report

    return attempt.fire(record_failure)
