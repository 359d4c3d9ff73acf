"""What happened, told after the commit that made it true.

| signal | sent when |
| --- | --- |
| `timeout_scheduled` | a timeout began to wait |
| `timeout_rescheduled` | a pending one got another deadline |
| `timeout_cancelled` | it was cancelled, by hand or because its condition stopped holding |
| `timeout_fired` | its handler's work was committed |
| `timeout_skipped` | it was due, but there was nothing to do |
| `timeout_failed` | an attempt failed; it will be tried again |
| `timeout_dead` | it was given up |

`sender` is the model class of the policy (the `Timeout` model for a policy that is not declared any more),
`timeout` the ledger row. Receivers run robustly: what one raises is logged and stops nothing. The bulk verbs
send no signals.

`worker_started` (`sender` is the class, `worker=` the worker) is for those who serve metrics or health pages from a
worker's process: it is sent once, in the main thread, before the worker takes anything.
"""

from __future__ import annotations

from django.dispatch import Signal

timeout_scheduled = Signal()
timeout_rescheduled = Signal()
timeout_cancelled = Signal()
timeout_fired = Signal()
timeout_skipped = Signal()
timeout_failed = Signal()
timeout_dead = Signal()
worker_started = Signal()
