"""Whether a policy is stopped, decided in the statement that needs to know.

A firing reads it in the query that locks the row. A cached answer is not enough for it: the process may have been
suspended between the answer and the firing, and would fire a policy that was paused meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.models import Exists, Q

from django_delayq.clock import DatabaseNow
from django_delayq.models import PolicyControl

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models import QuerySet

    from django_delayq.policies import TimeoutPolicy

Stop = PolicyControl.Stop


def is_stop_in_force(control: PolicyControl, now: datetime) -> bool:
    """Return whether the policy of `control` is stopped at `now`: not if its pause is over.

    A hold that is over stops it until a worker has moved its deadlines: otherwise timeouts would fire before that.
    """
    until = control.until if control.stop == Stop.PAUSED else None
    return bool(control.stop) and (until is None or until > now)  # as `stop_in_force` in SQL


def resumed_at(control: PolicyControl) -> datetime | None:
    """Return when the last stop of the policy ended, or, of a pause with an end, ends by itself; None: there was none.

    No timeout could fire before, so lateness counts from then on.
    """
    return control.until if control.stop == Stop.PAUSED and control.until else control.resumed_at


def stop_in_force(policy: TimeoutPolicy[Any]) -> Exists:
    """Return an expression for whether `policy` is stopped by the database clock, in the snapshot of the statement.

    EXISTS, not a join: FOR UPDATE would also lock the control, and firings would wait for each other.
    """
    return Exists(stops_in_force().filter(policy__in=policy.labels))


def stops_in_force(using: str | None = None) -> QuerySet[PolicyControl]:
    """Return the controls that stop their policy by the database clock."""
    stops = PolicyControl.objects.using(using).exclude(stop=Stop.NONE)
    return stops.filter(~Q(stop=Stop.PAUSED) | Q(until__isnull=True) | Q(until__gt=DatabaseNow()))
