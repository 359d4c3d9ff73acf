"""Signals, sent after the commit of what they report.

| signal | sent when |
| --- | --- |
| `timeout_scheduled` | a timeout was scheduled |
| `timeout_rescheduled` | a pending timeout got another deadline |
| `timeout_cancelled` | it was cancelled, by hand or because its condition stopped holding |
| `timeout_fired` | its handler's changes were committed |
| `timeout_skipped` | it was due, but there was nothing to do |
| `timeout_failed` | an attempt failed and will be retried |
| `timeout_dead` | it is dead: it will not be retried |

`sender` is the model class of the policy (the `Timeout` model if the policy is no longer declared), `timeout` the
ledger row. An exception in a receiver is logged and affects nothing else. The bulk functions send no signals.

`policy_paused` is sent when a policy has paused itself, because its brake counted too many firings. `sender` is the
model class, `policy` the policy, `change` the `PolicyChange` with the reason.

`worker_started` (`sender` is the class, `worker=` the worker) is sent once, in the main thread, before the worker
claims anything. Its receivers can serve metrics or health pages from the worker's process.

`entries_restored` (`sender` is `Timeout`, `count=` how many) is sent by a sweep that restored entries which Redis had
lost, in the process of that worker.
"""

from django.dispatch import Signal

timeout_scheduled = Signal()
timeout_rescheduled = Signal()
timeout_cancelled = Signal()
timeout_fired = Signal()
timeout_skipped = Signal()
timeout_failed = Signal()
timeout_dead = Signal()
policy_paused = Signal()
worker_started = Signal()
entries_restored = Signal()
