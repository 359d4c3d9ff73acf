"""Fire due timeouts: lock, check, compare-and-set, call the handler, commit.

In reading order:

    planning     which rows, in which pieces of work
    running      one piece of work, in any thread; never raises. Several timeouts in one transaction, or one
    attempt      that transaction: lock, check, mark, call, commit
    members      the timeouts of that transaction and their objects, locked
    handler      the call of a handler
    failures     the second transaction, after a handler raised
    non_atomic   `atomic=False`: the handler between two transactions

Beside them: `time_limits` abandons handlers that take too long, `overlap` monitors the statements of handlers,
`long_runs` logs slow handlers, `unknown` handles policies that are not declared in this process, `state` is what the
process has learned, `report` the input and output, and `checkpoints` are for tests.
"""

from __future__ import annotations

from django_delayq.firing.long_runs import log_long_runs
from django_delayq.firing.non_atomic import extend_firing, settle_expired
from django_delayq.firing.planning import plan
from django_delayq.firing.report import Report, Work
from django_delayq.firing.running import run

__all__ = ["Report", "Work", "extend_firing", "log_long_runs", "plan", "run", "settle_expired"]
