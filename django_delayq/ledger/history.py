"""The events that a row keeps: what happened to it, when, by whom and why; capped, so that rows stay small."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from django_delayq.ledger import scrubbing

if TYPE_CHECKING:
    from django_delayq.models import Timeout

MAX_EVENTS = 40
MAX_TRACEBACK = 6000
MAX_REASON = 255
# The reasons that the library itself gives; `story.REASONS` has them in the reader's language.
SINCE_CHANGED = "what it counts from has changed"
RENAMED = "the policy was renamed"


def event(what: str, at: datetime, *, by: str = "", reason: str = "", **details: Any) -> dict[str, Any]:
    """One event as JSON: `what`, `at`, and of the rest whatever is said; datetimes become ISO texts in UTC."""
    said = {"by": by, "reason": clipped(reason), **details}
    return {
        "at": _iso(at),
        "what": what,
        **{name: _iso(value) if isinstance(value, datetime) else value for name, value in said.items() if value},
    }


def appended(history: list[dict[str, Any]], *events: dict[str, Any]) -> list[dict[str, Any]]:
    """`history` with `events` behind; beyond the cap the oldest but the very first go."""
    longer = [*history, *events]
    return longer if len(longer) <= MAX_EVENTS else [longer[0], *longer[len(longer) - MAX_EVENTS + 1 :]]


def error_details(error: BaseException, timeout: Timeout | None = None) -> dict[str, str]:
    """What is kept of an exception of `timeout`: type, message and traceback, the last capped from the front.

    Scrubbed before it is capped: what is cut in two cannot be recognised.
    """
    return {
        "error": clean(type(error).__name__)[:MAX_REASON],
        "message": message_of(error, timeout)[:1000],
        "traceback": clean(scrubbing.traceback_of(error, timeout))[-MAX_TRACEBACK:],
    }


def message_of(error: BaseException, timeout: Timeout | None = None) -> str:
    """What `error` says, scrubbed, as a database takes it."""
    return clean(scrubbing.message_of(error, timeout))


def clipped(reason: str) -> str:
    """`reason` as it fits its column."""
    return clean(str(reason))[:MAX_REASON]


def clean(text: str) -> str:
    """`text` without what databases refuse: NUL and lone surrogates. A bad message must not stop the settling."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()


def _iso(at: datetime) -> str:
    return (at.astimezone(UTC) if timezone.is_aware(at) else at).isoformat()
