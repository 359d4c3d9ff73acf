"""Several timeouts of one policy in one transaction: one lock, one compare-and-set, one COMMIT.

Handlers run without savepoints, which would cost as much as a transaction each. So one that raises, be it only
an outcome, undoes the whole group, and its members are fired one by one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from django_delayq.firing.attempt import Attempt, Overlap, handle_each
from django_delayq.firing.pace import ALONE_AFTER_OVERLAP, MOST, WORK_SECONDS, pace_of
from django_delayq.firing.report import Findings
from django_delayq.firing.single import concluded, fire_one, trouble_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_delayq.firing.report import Candidate
    from django_delayq.policies import TimeoutPolicy


def fire_in_groups(policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str, findings: Findings) -> None:
    """All of `candidates` are fired in due order, in groups as large as the policy's pace allows.

    What has not had its turn after a while is given back: other threads and workers may take it, and a worker
    that is told to stop need not finish it.
    """
    pace = pace_of(policy.label)
    began = time.monotonic()
    rest = list(candidates)
    size = pace.group_size()
    while rest:
        group, rest = rest[:size], rest[size:]
        found = _fire_group(policy, group, using)
        findings.add(found)
        # Where others held every object of a group, most likely they hold the next ones too: find out in few steps.
        are_held = len(found.blameless) == len(group)
        size = min(MOST, 4 * size) if are_held else pace.group_size()
        if time.monotonic() - began > 2 * WORK_SECONDS:
            break
    findings.again.update({candidate.id: findings.moment() for candidate in rest})
    findings.blameless.update(candidate.id for candidate in rest)


def _fire_group(policy: TimeoutPolicy[Any], group: Sequence[Candidate], using: str) -> Findings:
    if len(group) == 1:
        return fire_one(policy, group[0], using)
    attempt = Attempt(policy, group, using)
    try:
        attempt.run(handle_each)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whose it is, firing one by one will show
        return _after(attempt, error)
    if attempt.watch and attempt.watch.overlaps:  # only the last one did, and hurt nobody
        pace_of(policy.label).go_alone(ALONE_AFTER_OVERLAP)
    return concluded(attempt)


def _after(attempt: Attempt, error: BaseException) -> Findings:
    pace = pace_of(attempt.policy.label)
    pace.was_undone(attempt.seconds / max(len(attempt.ready), 1))
    if isinstance(error, Overlap):
        pace.go_alone(ALONE_AFTER_OVERLAP)
    else:
        put_back = trouble_with(attempt, error)
        if put_back is not None:
            return put_back
    findings = Findings()
    for candidate in attempt.candidates:
        findings.add(fire_one(attempt.policy, candidate, attempt.using))
    return findings
