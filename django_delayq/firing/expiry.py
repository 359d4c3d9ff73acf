"""Rows that are `firing` (`atomic=False`): keep alive those of living workers, settle those whose process died."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from django_delayq import clock
from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.firing.failures import WorkerDied, record
from django_delayq.firing.report import Findings
from django_delayq.ledger import settling
from django_delayq.policies import registry

if TYPE_CHECKING:
    from collections.abc import Collection

LEFT_TO_OTHERS: Final = timedelta(minutes=1)
"""How long a row of a policy that is not declared here is left to workers that know it."""
_WORDS = "The process that ran this attempt died, or was cut off for longer than its lease."


def settle_dead_attempts(using: str, limit: int, ids: Collection[int] | None = None) -> Findings:
    """Expired `firing` rows, at most `limit`, only `ids` if given, had an attempt that died: by the retry ladder."""
    findings, since_long = Findings(), clock.now() - LEFT_TO_OTHERS
    for row in settling.expired(using, limit, ids):
        seen = {"state": row.state, "attempts": row.attempts, "run_at": row.run_at}
        policy = registry.get(row.policy)
        if policy is None and row.run_at > since_long:
            continue  # a worker that knows the policy also knows its retries
        findings.add(record(policy, row.pk, WorkerDied(_WORDS), using, seen=seen, charged=True))
    return findings


def extend_firing(ids: Collection[int], using: str) -> None:
    """Those of `ids` that are `firing` have one `LEASE` from now on: their worker lives. Others are left alone."""
    if ids:
        settling.extend(ids, database_now(using) + get_settings().lease, using)
