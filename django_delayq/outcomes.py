"""Exceptions by which a handler decides the outcome. Its own database changes are rolled back first."""

from __future__ import annotations

from typing import Unpack

from django_delayq.delays import DelayArgs, parse_delay
from django_delayq.exceptions import InvalidDelay


class Outcome(Exception):
    """The base class."""

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
