"""How a handler decides the outcome: raised, its database changes are rolled back; returned, they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from django_delayq.exceptions import InvalidDelay
from django_delayq.times.lengths import DelayArgs, parse_delay


class Outcome(Exception):
    """The base class. `raise` undoes what the handler has written in its transaction, `return` commits it."""

    reason = ""

    def __init__(self, reason: str = "") -> None:
        super().__init__("" if reason is None else reason)  # which the log shows
        self.reason = reason


class Snooze(Outcome):
    """Fire again later: the timeout stays pending, and no attempt is counted.

    Takes the delay grammar (`Snooze(minutes=5)`, `Snooze(after=...)`, `Snooze(at=...)`) and `reason=`. Raises
    InvalidDelay.
    """

    def __init__(self, *, reason: str = "", **delay: Unpack[DelayArgs]) -> None:
        parsed = parse_delay(dict(delay))
        if parsed is None:
            raise InvalidDelay("Snooze needs a delay, such as Snooze(minutes=5).")
        super().__init__(reason or f"snoozed: {parsed}")
        self.delay = parsed
        self.reason = reason


class Skip(Outcome):
    """Settle as `skipped`: the handler has nothing to do."""


class GiveUp(Outcome):
    """Settle as `dead` now: a retry would not help."""


@dataclass(frozen=True, slots=True)
class Fired:
    """Returned by a handler: the timeout fires, as after any other return, and `reason` is stored with it.

    Not an exception: what a handler has done cannot be undone and count as done.
    """

    reason: str = ""


def returned_outcome(value: Any) -> Outcome | Fired | None:
    """Return the outcome that a handler or a `confirm` function has returned; None: another value.

    Raises InvalidDelay for the class `Snooze` in place of an instance.
    """
    if isinstance(value, type) and issubclass(value, Outcome | Fired):
        return value()  # as `raise Skip` does
    return value if isinstance(value, Outcome | Fired) else None
