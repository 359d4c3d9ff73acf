"""The operations that stop the clocks of timeouts, and let them run again."""

from __future__ import annotations

from datetime import datetime

from django_delayq import signals
from django_delayq.arming import holding
from django_delayq.models import Timeout
from django_delayq.operations.runner import (
    Action,
    Context,
    Progress,
    Refusal,
    Result,
    Target,
    refuse_unless_waiting,
)
from django_delayq.scheduling.holding import checked_end


def hold_timeout(
    target: Target,
    *,
    by: str,
    reason: str = "",
    until: datetime | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Stop the clocks of pending timeouts by hand: the rest of their time is kept, and nothing fires.

    Those that are held already get another end. They can be cancelled and postponed meanwhile. The other arguments and
    errors are those of `cancel`.

    Args:
        until: a datetime in the future, from which the clocks run again; None: until they are resumed.

    Raises:
        InvalidDelay: `until` has passed, is not a datetime, or its awareness does not fit `USE_TZ`.
    """
    end = checked_end(until)

    def write(rows: list[Timeout], context: Context) -> None:
        holding.end_passed(rows, context.using)
        holding.hold_by_hand(rows, context.using, context.now, end, by=context.by, reason=context.reason)

    action = Action("hold_timeout", signals.timeout_held, refuse_unless_waiting, write)
    return action.run(target, by=by, reason=reason, dry_run=dry_run, progress=progress)


def resume_timeout(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """End the holds by hand: each deadline is now plus the rest of the time of its timeout.

    The clocks of timeouts for which `hold_when` of their policy holds stay stopped until it does not. Arguments and
    errors are those of `cancel`.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        return refuse_unless_waiting(row, context) or (None if row.held_by_hand else Refusal.NOT_HELD)

    def write(rows: list[Timeout], context: Context) -> list[Timeout]:
        return holding.end_hold_by_hand(rows, context.using, context.now, by=context.by, reason=context.reason)[0]

    action = Action("resume_timeout", signals.timeout_resumed, refuse, write)
    return action.run(target, by=by, reason=reason, dry_run=dry_run, progress=progress)
