"""The operations that hold timeouts: they stop their clocks or pause them, and let them run again."""

from __future__ import annotations

from datetime import datetime
from typing import Unpack

from django_delayq import signals
from django_delayq.arming import holding
from django_delayq.models import Timeout
from django_delayq.operations.runner import Action, Context, How, Refusal, Result, Target, refuse_unless_waiting
from django_delayq.scheduling.holding import checked_end


def hold_timeout(target: Target, *, until: datetime | None = None, **how: Unpack[How]) -> Result:
    """Stop the clocks of pending timeouts by hand: nothing fires, and the rest of their time is kept.

    Those that are held already get another end. They can be cancelled and postponed meanwhile. The other arguments and
    errors are those of `cancel`.

    Args:
        until: a datetime in the future, from which the clocks run again; None: until they are resumed.

    Raises:
        InvalidDelay: `until` has passed, is not a datetime, or its awareness does not fit `USE_TZ`.
    """
    return _hold("hold_timeout", target, until, False, **how)


def pause_timeout(target: Target, *, until: datetime | None = None, **how: Unpack[How]) -> Result:
    """Let pending timeouts not fire until they are resumed, although their deadlines stay where they are.

    Then those are due at once whose deadlines have passed. A clock that is stopped already stays stopped by hand, with
    the rest of its time. The other arguments and errors are those of `cancel`, and `until` that of `hold_timeout`.
    """
    return _hold("pause_timeout", target, until, True, **how)


def _hold(name: str, target: Target, until: datetime | None, keep_deadline: bool, **how: Unpack[How]) -> Result:
    end = checked_end(until)

    def write(rows: list[Timeout], context: Context) -> None:
        holding.end_passed(rows, context.facts)
        event = {"by": context.by, "reason": context.reason}
        holding.hold_by_hand(rows, context.facts, end, keep_deadline=keep_deadline, **event)

    return Action(name, signals.timeout_held, refuse_unless_waiting, write).run(target, **how)


def resume_timeout(target: Target, **how: Unpack[How]) -> Result:
    """End the holds and pauses by hand: a deadline moves by the time of its policy that was stopped.

    One that is paused has its former deadline. `Result.due_at_once` counts those that are due then. The clocks of
    timeouts for which `hold_when` of their policy holds stay stopped until it does not. Arguments and errors are those
    of `cancel`.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        if why := refuse_unless_waiting(row, context) or (None if row.held_by_hand else Refusal.NOT_HELD):
            return why
        facts = context.facts
        context.fires(row, not facts.is_on_hold(row) and holding.attempt_if_resumed(row, facts) <= facts.now)
        return None

    def write(rows: list[Timeout], context: Context) -> list[Timeout]:
        return holding.end_hold_by_hand(rows, context.facts, by=context.by, reason=context.reason)

    return Action("resume_timeout", signals.timeout_resumed, refuse, write).run(target, **how)
