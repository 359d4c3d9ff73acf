"""Every error this library raises, as a tree by who has to react. Imports no Django.

Programmer errors (`PolicyError`, `UnknownPolicy`, `InvalidDelay`, `InvalidPayload`) mean a call or a
declaration is wrong. Business answers (`DeadlinePassed`, `TimeoutConflict`, `ExtensionLimit`) are part
of the normal course of a shop and are meant to be caught. `EngineError` is about Redis and never
reaches a view: the ledger is the truth, and Redis only holds hints.

None of them leaves anything written behind, and the caller's transaction stays usable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_delayq.models import Timeout


class DelayqError(Exception):
    """The root: `except DelayqError` catches whatever this library raises on purpose."""


class PolicyError(DelayqError, ValueError):
    """A policy's declaration is wrong; raised when it is declared, with a hint."""


class UnknownPolicy(DelayqError, LookupError):
    """No policy of that name is declared; the message offers names that are near it."""


class InvalidDelay(DelayqError, ValueError):
    """A delay is negative, mixed, naive, missing or of the wrong type."""


class InvalidPayload(DelayqError, TypeError):
    """A payload cannot be kept as JSON in every supported database."""


class TimeoutConflict(DelayqError):
    """`on_conflict="error"`, and one is pending already: it is in `.timeout`."""

    def __init__(self, message: str, timeout: Timeout) -> None:
        super().__init__(message)
        self.timeout = timeout


class ExtensionLimit(DelayqError):
    """The policy's `max_extensions` is used up; the timeout, unchanged, is in `.timeout`."""

    def __init__(self, message: str, timeout: Timeout) -> None:
        super().__init__(message)
        self.timeout = timeout


class DeadlinePassed(DelayqError):
    """Too late: the current round has fired or is firing; it is in `.timeout`."""

    def __init__(self, message: str, timeout: Timeout) -> None:
        super().__init__(message)
        self.timeout = timeout


class EngineError(DelayqError):
    """Redis did not do what was asked. Nothing is lost: the ledger still has the row."""


class EngineUnavailable(EngineError):
    """Redis cannot be reached, is loading, failing over, or out of memory: try again later."""


class EngineFull(EngineUnavailable):
    """Redis is out of memory: nothing new goes in, and what is there still comes out."""
