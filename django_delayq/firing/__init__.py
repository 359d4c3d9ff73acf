"""Fire what is due: lock, check, compare-and-set, handler, commit.

    planning   which rows, in which pieces of work        one query
    running    one piece of work, in any thread           never raises
    groups, batches, single, suspects                     transactions that fire, built on
    attempt    one of them: begin, mark, handler, commit, with
    taking     lock the objects, lock the rows, ask the condition
    outside    atomic=False: the handler between two transactions; expiry: when its process died
    failures   what becomes of a timeout whose handler raised
    unknown    timeouts of policies that are not declared in this process
    long_runs  works that take longer than a second, or than a lease

`plan` and `run` are what a worker needs, wherever it gets its entries; `settle_expired` and `extend_firing`
keep `atomic=False` alive.
"""

from __future__ import annotations

from django_delayq.firing.expiry import extend_firing, settle_dead_attempts
from django_delayq.firing.long_runs import log_long_runs
from django_delayq.firing.planning import plan
from django_delayq.firing.report import Report, Work
from django_delayq.firing.running import run, tell

__all__ = ["Report", "Work", "extend_firing", "log_long_runs", "plan", "run", "settle_expired"]


def settle_expired(using: str, limit: int = 1000) -> Report:
    """Rows whose `firing` expired are as after any failed attempt: waiting again, dead, cancelled or superseded.

    At most `limit`, the longest expired first. Any number of workers may do so at once. Raises the database's errors.
    """
    findings = settle_dead_attempts(using, limit)
    tell(findings, using)
    return findings.report()
