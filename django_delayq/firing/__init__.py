"""Fire due timeouts: lock, check, compare-and-set, call the handler, commit.

In reading order:

    planning     which rows, in which pieces of work
    running      one piece of work, in any thread. One timeout in one transaction; several with `batch` or
                 `together`; with `atomic=False` a handler between two transactions
    gathering    with `batch_by`: the due timeouts of one value, whatever the work has of them; it notes suspects
    attempt      that transaction: lock, check, mark, call, commit
    asking       before it: what `confirm` answers, with nothing locked
    judge        which timeouts of that transaction may fire; it locks, checks and marks them
    members      these timeouts and their objects, locked
    rails        the guard rails: what is too late or in shadow mode does not call its handler; the brake counts
    handler      the call of a handler, what this thread runs meanwhile, and checkpoints for tests
    settling     what its outcome means for the row: written at once, or by a second transaction after it raised

Beside them: `works` is what these steps pass to each other, `time_limits` logs slow handlers, and abandons those that
take too long, `leftovers` watches their statements, and closes connections that they leave in a wrong state, `state` is
what the process remembers, `report` collects the outcomes, and `log_lines` writes them to the log.
"""

from __future__ import annotations

from django_delayq.firing.planning import plan
from django_delayq.firing.running import extend_firing, run
from django_delayq.firing.settling import settle_expired
from django_delayq.firing.time_limits import log_long_runs
from django_delayq.firing.works import Report, Work

__all__ = ["Report", "Work", "extend_firing", "log_long_runs", "plan", "run", "settle_expired"]
