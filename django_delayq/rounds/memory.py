"""What a round remembers: its events, and when its clock was stopped; capped, so that rows stay small."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from django_delayq.times import clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from django_delayq.models import Timeout

MAX_EVENTS = 40
"""A timeout that is snoozed each minute would otherwise grow, and be rewritten whole, without end."""
ERASED_KEY = "(erased)"
"""The key of an erased row that had one: with an empty one, it would close a round of the object without a key."""
KEPT = frozenset(("at", "what", "by", "from", "to", "until", "rest", "number", "attempt", "timeout", "late", "error"))
"""What an event keeps when personal data is erased: times, numbers, ids, operators, and types of errors."""
BY_APPLICATION = ("hand", "save")
"""The actors of events that are not operators."""
MAX_REASON = 255
"""The columns of the ledger hold no more."""
# The reasons that the library itself gives; `story.reason_label` translates them.
DIED = "The process died 3 times while this timeout ran alone in it."
SINCE_CHANGED = "what it counts from has changed"
BRAKED = "{count} timeouts fired within {per}; the brake allows {most}."


def record(row: Timeout, what: str, at: datetime, *, by: str = "", reason: str = "", **details: Any) -> None:
    """Add an event to the history of `row`, in memory."""
    row.history = with_event(row.history, what, at, by=by, reason=reason, **details)


def record_death(row: Timeout, now: datetime) -> None:
    """Add the death of `row`, if it is dead, to its history, because its columns are about to say something else."""
    if row.state == row.State.DEAD:
        record(row, "dead", row.settled_at or now, reason=row.reason)


def with_events(row: Timeout, said: Iterable[Mapping[str, Any]], at: datetime) -> list[dict[str, Any]]:
    """Return the history of `row` with the events `said`, each with `what` and what else `with_event` takes."""
    history: list[dict[str, Any]] = row.history
    for event in said:
        history = with_event(history, at=at, **event)
    return history


def with_event(
    history: list[dict[str, Any]], what: str, at: datetime, *, by: str = "", reason: str = "", **details: Any
) -> list[dict[str, Any]]:
    """Return `history` with one more event; beyond the cap the oldest but the first are dropped.

    An event has `what`, `at`, and of the others those that are not empty; datetimes as ISO strings in UTC.
    """
    said = {"by": by, "reason": clipped(reason), **details}
    values = {name: iso(value) if isinstance(value, datetime) else value for name, value in said.items() if value}
    longer = [*history, {"at": iso(at), "what": what, **values}]
    return longer if len(longer) <= MAX_EVENTS else [longer[0], *longer[-MAX_EVENTS + 1 :]]


def without_data(row: Timeout) -> list[dict[str, Any]]:
    """Return the history of `row` without what may be personal data, and without former erasures.

    Only what is named in `KEPT` is kept, so that a new detail of an event is erased until it is listed there.
    """
    kept = [{name: value for name, value in event.items() if name in KEPT} for event in row.history]
    return [event for event in kept if event.get("what") != "erased"]


def with_stop(stops: Any, begin: datetime, end: datetime) -> Any:
    """Return the stops of a round, as its column has them, with one more, which ended last.

    Beyond `MAX_EVENTS`, two become one: those with the least time between them, so that no deadline becomes earlier.
    """
    if end <= begin:
        return stops
    longer = [*(stops or ()), [iso(begin), iso(end)]]
    if len(longer) > MAX_EVENTS:
        at = min(range(1, len(longer)), key=lambda n: moment(longer[n][0]) - moment(longer[n - 1][1]))
        longer[at - 1 : at + 1] = [[longer[at - 1][0], longer[at][1]]]
    return longer


def stops_of(stops: Any) -> list[tuple[datetime, datetime]]:
    """Return begin and end of each of the stops that a column has."""
    return [(moment(begin), moment(end)) for begin, end in stops or ()]


def clipped(reason: object) -> str:
    """Return `reason` so that it fits its column; None, as of an optional field, becomes empty."""
    return "" if reason is None else clean(str(reason))[:MAX_REASON]


def clean(text: str) -> str:
    """Replace what databases refuse: NUL and lone surrogates. Such a message must not prevent the row from settling."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()


def moment(text: str) -> datetime:
    """Return the time that `iso` has written, fitting to `USE_TZ`, which may have been switched since then."""
    return clock.fitting(datetime.fromisoformat(text))


def iso(at: datetime | None) -> str | None:
    """Return `at` as a string for JSON, in UTC if it is aware."""
    return None if at is None else (at.astimezone(UTC) if timezone.is_aware(at) else at).isoformat()
