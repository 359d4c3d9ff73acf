"""The errors that this library raises. Imports no Django.

Programming errors (`PolicyError`, `UnknownPolicy`, `InvalidDelay`, `InvalidPayload`) mean that a call or a
declaration is wrong. Business errors, which are about a row and defined in `scheduling.errors`, occur in normal
operation and are meant to be caught. `EngineError` concerns Redis and never reaches a view, because the ledger is the
truth.

When one is raised, nothing has been written, and the caller's transaction stays usable.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DelayqError(Exception):
    """The base class: `except DelayqError` catches all errors of this library."""


class PolicyError(DelayqError, ValueError):
    """A policy's declaration is wrong; raised when it is declared."""


class UnknownPolicy(DelayqError, LookupError):
    """No policy of that name is declared; the message suggests similar names."""


class InvalidDelay(DelayqError, ValueError):
    """A delay is negative, mixed, naive, missing or of the wrong type."""


class InvalidPayload(DelayqError, TypeError):
    """A payload cannot be stored as JSON in every supported database."""


class TimeLimitExceeded(DelayqError):
    """A call of a handler took longer than its limit. The attempt failed, and its transaction, if any, rolled back."""


class Abandoned(BaseException):
    """Raised in a thread whose handler took too long: another thread has recorded the attempt, and this one must end.

    Not an `Exception`, so that a handler does not catch it by mistake.
    """


class NotMigrated(DelayqError):
    """The database lacks tables or columns, because migrations are not applied."""


class WrongInstallation(DelayqError):
    """The ledger belongs to another installation. Nothing was changed."""


class EngineError(DelayqError):
    """Redis failed. Nothing is lost: the ledger still has the row."""


class EngineUnavailable(EngineError):
    """Redis cannot be reached, is loading, failing over, or out of memory: retry later."""


class EngineFull(EngineUnavailable):
    """Redis is out of memory: it accepts no new entries, but existing ones can be claimed."""


def suggestion(wrong: object, known: Iterable[str], otherwise: str) -> str:
    """Return a hint for a message about the name `wrong`: which one of `known` is similar, or `otherwise`."""
    names = list(known)
    near = difflib.get_close_matches(str(wrong), names, n=1, cutoff=0.7)  # by `THREADS`, `REDIS` is not meant
    near = near or [name for name in names if str(wrong).startswith(name)]  # but by `monday`, `mon` is
    return f"Did you mean {near[0]!r}?" if near else otherwise
