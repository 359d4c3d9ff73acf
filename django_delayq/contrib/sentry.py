"""Sentry: a scope for each call of a handler, or of `confirm`, which names the policy, the timeout and its object.

`DELAYQ = {"AROUND": ["django_delayq.contrib.sentry.around_handler"]}`. The project calls `sentry_sdk.init`. A failed
attempt is logged within the scope of its handler, and Sentry's integration of `logging` makes an event of each error.
See `docs/how-to/tracing.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sentry_sdk

from django_delayq.ledger.error_texts import scrubbed
from django_delayq.ledger.traces import attempt_of
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy

if TYPE_CHECKING:
    from sentry_sdk.types import Event, Hint


@contextmanager
def around_handler(policy: TimeoutPolicy[Any], timeouts: Sequence[Timeout]) -> Iterator[None]:
    """Run a call of a handler in an isolation scope of its own, so that nothing of it reaches the next timeout."""

    def name_transaction(event: Event, hint: Hint) -> Event:
        # Not `set_transaction_name`: it would rename the transaction of Celery's task, or be replaced by its name.
        if "type" not in event:  # an error, and not a transaction of the handler
            event["transaction"], event["transaction_info"] = policy.label, {"source": "task"}
        return event

    with sentry_sdk.isolation_scope() as scope:
        scope.clear_breadcrumbs()  # of what this thread has run before
        scope.add_event_processor(name_transaction)
        scope.set_tag("delayq.policy", policy.label)
        if len(timeouts) > 1:
            scope.set_tag("delayq.timeouts", str(len(timeouts)))
        for row in timeouts if len(timeouts) == 1 else ():
            scope.set_tag("delayq.timeout", str(row.pk))
            scope.set_tag("delayq.object", scrubbed(row.object_id, row))
            scope.set_tag("delayq.attempt", str(attempt_of(row)))
        yield
