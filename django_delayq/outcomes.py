"""What a handler can raise on purpose. In each case its own database work is undone first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_delayq.delays import DelayArgs, parse_delay
from django_delayq.exceptions import InvalidDelay

if TYPE_CHECKING:
    from typing import Unpack


class Outcome(Exception):
    """The base of the answers below."""

    reason: str = ""


class Snooze(Outcome):
    """Again later: the timeout stays pending and no attempt is counted.

    Takes the delay grammar (`Snooze(minutes=5)`, `Snooze(after=...)`, `Snooze(at=...)`) and `reason=`.

    Raises:
        InvalidDelay: no delay, or a wrong one.
    """

    def __init__(self, *, reason: str = "", **delay: Unpack[DelayArgs]) -> None:
        parsed = parse_delay(dict(delay))
        if parsed is None:
            raise InvalidDelay("Snooze needs to know for how long: Snooze(minutes=5).")
        self.delay = parsed
        self.reason = reason
        super().__init__(reason or f"snoozed: {parsed}")


class Skip(Outcome):
    """Settle as `skipped`: nothing is to be done, and that is right."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason)


class GiveUp(Outcome):
    """Settle as `dead` now: trying again would not help."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason)
