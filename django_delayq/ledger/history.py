"""The events that a row keeps: what happened to it, when, who did it and why; capped, so that rows stay small."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.utils import timezone

from django_delayq import clock
from django_delayq.ledger import scrubbing
from django_delayq.models import Timeout

MAX_EVENTS = 40
_COUNTING = frozenset(("snoozed", "retried"))
MAX_TRACEBACK = 6000
MAX_REASON = 255
# The reasons that the library itself gives; `story.reason_label` translates them.
SINCE_CHANGED = "what it counts from has changed"
RENAMED = "the policy was renamed"
BRAKED = "{count} timeouts fired within {per}; the brake allows {most}."


def record(row: Timeout, what: str, at: datetime, *, by: str = "", reason: str = "", **details: Any) -> None:
    """Add an event to the history of `row`, in memory."""
    row.history = appended(row.history, event(what, at, by=by, reason=reason, **details))


def record_death(row: Timeout, now: datetime) -> None:
    """Add the death of `row`, if it is dead, to its history, because its columns are about to say something else."""
    if row.state == row.State.DEAD:
        record(row, "dead", row.settled_at or now, reason=row.reason)


def event(what: str, at: datetime, *, by: str = "", reason: str = "", **details: Any) -> dict[str, Any]:
    """Return an event as JSON: `what`, `at`, and the others that are not empty; datetimes as ISO strings in UTC."""
    said = {"by": by, "reason": clipped(reason), **details}
    return {
        "at": iso(at),
        "what": what,
        **{name: iso(value) if isinstance(value, datetime) else value for name, value in said.items() if value},
    }


def appended(history: list[dict[str, Any]], *events: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `history` with `events` appended; beyond the cap the oldest are dropped.

    Kept are the first one, and the last one that `snoozes_of` needs, which takes the place of the second one.
    """
    longer = [*history, *events]
    if len(longer) <= MAX_EVENTS:
        return longer
    dropped, kept = longer[1 : -MAX_EVENTS + 1], longer[-MAX_EVENTS + 1 :]
    counting = [event for event in dropped if event.get("what") in _COUNTING]
    if counting and not any(event.get("what") in _COUNTING for event in kept):
        kept[0] = counting[-1]
    return [longer[0], *kept]


def snoozes_of(history: list[dict[str, Any]]) -> int:
    """Return how often the handler has snoozed since the row was scheduled, or since an operator has retried it.

    Each snooze has a running number, because old events are dropped.
    """
    last: dict[str, Any] = next((event for event in reversed(history) if event.get("what") in _COUNTING), {})
    number = last.get("number", 0)
    return number if isinstance(number, int) else 0


def began_at(row: Timeout) -> datetime:
    """Return when the round of `row` was scheduled, or when an operator has retried it."""
    retried = [event["at"] for event in row.history if event.get("what") == "retried"]
    return moment(retried[-1]) if retried else row.created_at


def error_details(error: BaseException, timeout: Timeout | None = None) -> dict[str, str]:
    """Return what is kept of an exception of `timeout`: type, message, and the end of the traceback.

    Scrubbed before it is capped, because a secret that is cut in two is not recognised.
    """
    return {
        "error": clean(type(error).__name__)[:MAX_REASON],
        "message": message_of(error, timeout)[:1000],
        "traceback": clean(scrubbing.traceback_of(error, timeout))[-MAX_TRACEBACK:],
    }


def message_of(error: BaseException, timeout: Timeout | None = None) -> str:
    """Return the message of `error`, scrubbed and clean."""
    return clean(scrubbing.message_of(error, timeout))


def clipped(reason: str) -> str:
    """Return `reason` so that it fits its column."""
    return clean(str(reason))[:MAX_REASON]


def clean(text: str) -> str:
    """Replace what databases refuse: NUL and lone surrogates. Such a message must not prevent the row from settling."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()


def moment(text: str) -> datetime:
    """Return the time that `iso` has written, fitting to `USE_TZ`, which may have been switched since then."""
    return clock.fitting(datetime.fromisoformat(text))


def iso(at: datetime | None) -> str | None:
    """Return `at` as a string for JSON, in UTC if it is aware."""
    return None if at is None else (at.astimezone(UTC) if timezone.is_aware(at) else at).isoformat()
