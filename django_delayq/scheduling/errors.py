"""The errors about a row of the ledger, which occur in normal operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_delayq.exceptions import DelayqError

if TYPE_CHECKING:
    from django_delayq.models import Timeout


class _AboutTimeout(DelayqError):
    """An error about the row `timeout` of the ledger."""

    def __init__(self, message: str, timeout: Timeout) -> None:
        super().__init__(message, timeout)  # both, or it could not be unpickled, as by Django's parallel tests
        self.timeout = timeout

    def __str__(self) -> str:
        return str(self.args[0])


class TimeoutConflict(_AboutTimeout):
    """`on_conflict="error"`, and `timeout` is already pending."""


class ExtensionLimit(_AboutTimeout):
    """The policy's `max_extensions` or `Limits(total=...)` is used up; `timeout` is unchanged."""


class DeadlinePassed(_AboutTimeout):
    """The current round, `timeout`, has fired or is firing. With `strict=True`: its deadline has passed."""


class DeadlineUndecided(DeadlinePassed):
    """A handler with `atomic=False` is running for `timeout`: it may still skip, snooze or fail. Try again later.

    A web service answers 503, so that its client comes back.
    """


class NotWaiting(DelayqError):
    """With `waiting=True`: `when` of the policy does not hold. The object was paid before, or a person cancelled it."""
