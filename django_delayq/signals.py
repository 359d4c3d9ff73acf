"""Signals, sent after the commit of what they report; those whose names end with `ing` before it.

Those of timeouts have the arguments `sender`, the model class of the policy (the `Timeout` model if the policy is no
longer declared), and `timeout`, the ledger row. An exception in a receiver is logged and affects nothing else. The bulk
functions and the sync send no signals.
"""

import logging
from typing import Any

from django.dispatch import Signal as DjangoSignal


class Signal(DjangoSignal):
    """A signal whose receivers may be of any kind."""

    def _log_robust_failure(self, receiver: Any, error: Exception) -> None:
        """Log that `receiver` raised.

        Django logs its `__qualname__`. A `functools.partial` and an object have none: then `send_robust` itself raises,
        in the worker, or after the commit in the caller of the library.
        """
        name, words = getattr(receiver, "__qualname__", receiver), "Error calling %s in Signal.send_robust() (%s)"
        logging.getLogger("django.dispatch").error(words, name, error, exc_info=error)


timeout_scheduled = Signal()
"""A timeout was scheduled."""
timeout_rescheduled = Signal()
"""A pending timeout got another deadline."""
timeout_held = Signal()
"""The clock of a timeout was stopped, by hand or by its condition `hold_when`; or the end of a hold was changed."""
timeout_resumed = Signal()
"""The clock of a timeout runs again; the timeout has another deadline."""
timeout_cancelled = Signal()
"""A timeout was cancelled, by hand or because its condition stopped holding."""
timeout_rearmed = Signal()
"""A round that `before_deadline` had ended was armed again: a payment was refused, or an old instance was saved.

By a save or the sync. `timeout_scheduled` is sent, too, if a save has armed it.
"""
timeout_fired = Signal()
"""The changes of a handler were committed."""
timeout_skipped = Signal()
"""A timeout was due, but there was nothing to do."""
timeout_failed = Signal()
"""An attempt failed and will be retried."""
timeout_dead = Signal()
"""A timeout is dead, and will not be retried."""
policy_paused = Signal()
"""A policy has paused itself, because its brake counted too many firings.

`sender` is the model class, `policy` the policy, `change` the `PolicyChange` with the reason.
"""
timeouts_settling = Signal()
"""A firing settles timeouts: sent in its transaction, after the handler.

`sender` is `Timeout`, `timeouts` the rows, `using` the database. What a receiver writes there is committed with the
outcomes. What it raises rolls the transaction back: the attempt fails, and is retried.
"""
policy_pausing = Signal()
"""A policy pauses itself: sent in that transaction, with the arguments of `policy_paused`, and `using`.

`fired` is the number of timeouts that have fired within the period of `brake`, which is in force.
"""
timeouts_pruned = Signal()
"""Old timeouts were deleted. `sender` is `Timeout`, `using` the database, `before` when the others were settled."""
timeouts_erasing = Signal()
"""The personal data of timeouts is erased: sent in that transaction, before it.

`sender` is `Timeout`, `timeouts` the rows, `using` the database. Receivers erase the copies that they have made.
"""
worker_started = Signal()
"""A worker is about to claim its first timeouts; sent once in each process, in its main thread.

`sender` is the class, `worker` the worker. Receivers can serve metrics or health pages from the process.
"""
entries_restored = Signal()
"""A sweep restored entries that Redis had lost. `sender` is `Timeout`, `count` the number of entries."""
