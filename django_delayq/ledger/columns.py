"""The columns of the ledger that belong together: those of a state, of a new round, of a move.

Statements of schedulers and of workers write them.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from django_delayq.models import Timeout
from django_delayq.rounds.outcomes import ATTEMPTS, LEASE
from django_delayq.sql.now import DatabaseNow
from django_delayq.sql.statements import Param
from django_delayq.times.clock import latest_start


def far() -> datetime:
    """Return the `run_at` of a row whose clock is stopped: the last supported datetime, so that no worker finds it."""
    return latest_start(timedelta.resolution)


GIVEN: tuple[str, ...] = ("queue", "payload", "reason", "share", "trace")
DEADLINE: tuple[str, ...] = ("due_at", "terms", "computed_due_at", "asked_due_at", "restarted_at", "hold_ended_at")
DEADLINE += ("is_requested", "is_due_by_request")
STEPS: tuple[str, ...] = ("step", "steps_over")
ROUND: tuple[str, ...] = ("since_at", "created_at", "retried_at", "idempotency_key")
# Not `first_due_at` and `extensions`: else a caller that may extend a cart three times could keep it indefinitely by
# replacing its timeout.
ROUND_FIELDS: tuple[str, ...] = (*GIVEN, *DEADLINE, *STEPS, *ROUND, *ATTEMPTS, *LEASE, "run_at", "ready_at", "stops")
ROUND_FIELDS += ("policy", "history")
"""The columns that replacing a pending row overwrites."""
MOVED_FIELDS: tuple[str, ...] = (*DEADLINE, *STEPS, *LEASE, "run_at", "ready_at", "extensions", "history")
"""The columns that moving a row writes."""
DEFAULTS: dict[str, Any] = {field.attname: field.get_default() for field in Timeout._meta.concrete_fields}
TIMES = ("due_at", "run_at", "first_due_at")
"""The columns that are equal in a new row."""


def is_suspect(row: Any) -> bool:
    """Return whether a process may have died while `row`, an unsettled row or its columns, ran."""
    return row.state == Timeout.State.FIRING or row.suspected_at is not None or row.deaths > 0


def attempt_expired(longest_lease: timedelta) -> Q:
    """Return a condition for rows that are firing: their lease has ended, or ends later than any may."""
    return Q(run_at__lte=DatabaseNow()) | Q(run_at__gt=DatabaseNow() + longest_lease)


def param(name: str) -> Param:
    """Return the parameter for a column of the ledger."""
    field: Any = Timeout._meta.get_field(name)
    return Param(field)


def params(name: str, count: int) -> list[Any]:
    """Return parameters for a sequence of so many values of one column of the ledger."""
    field: Any = Timeout._meta.get_field(name)
    return [Param(field, name, index) for index in range(count)]
