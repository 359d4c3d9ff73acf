"""What is kept of events and of errors: what happened, when, who did it and why; capped, so that rows stay small.

An exception's message may contain what readers of the ledger and of the log must not see: an address, a token, a card
number. The setting `SCRUB` filters it. Locals are never included. If the scrubber fails, the message is withheld, and
the attempt is recorded without it.
"""

from __future__ import annotations

import json
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias, cast

import asgiref
import django
from django.db.models import QuerySet
from django.utils import timezone

from django_delayq.conf import callable_of, get_settings
from django_delayq.models import Timeout
from django_delayq.times import clock

MAX_EVENTS = 40
"""A timeout that is snoozed each minute would otherwise grow, and be rewritten whole, without end."""
ERASED_KEY = "(erased)"
"""The key of an erased row that had one: with an empty one, it would close a round of the object without a key."""
KEPT = frozenset(("at", "what", "by", "from", "to", "until", "rest", "number", "attempt", "timeout", "late", "error"))
"""What an event keeps when personal data is erased: times, numbers, ids, operators, and types of errors."""
BY_APPLICATION = ("hand", "save")
"""The actors of events that are not operators."""
MAX_MESSAGE = 1_000
"""Some libraries put whole responses into their messages: 40 of them must fit into a row."""
MAX_LOGGED = 50_000
"""A longer traceback contains a message of megabytes, and is logged as short as it is stored."""
MAX_TRACEBACK = 6000
"""The last frames, which name the cause, have room; a recursion of a thousand frames has none."""
MAX_REASON = 255
"""The columns of the ledger hold no more."""
# Reasons that the library itself gives; `story.reason_label` translates them.
SINCE_CHANGED = "what it counts from has changed"
BRAKED = "{count} timeouts fired within {per}; the brake allows {most}."


def record(row: Timeout, what: str, at: datetime, *, by: str = "", reason: str = "", **details: Any) -> None:
    """Add an event to the history of `row`, in memory."""
    row.history = with_event(row.history, what, at, by=by, reason=reason, **details)


def record_death(row: Timeout, now: datetime) -> None:
    """Add the death of `row`, if it is dead, to its history, because its columns are about to say something else."""
    if row.state == row.State.DEAD:
        record(row, "dead", row.settled_at or now, reason=row.reason)


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


def with_events(row: Timeout, said: Iterable[Mapping[str, Any]], at: datetime) -> list[dict[str, Any]]:
    """Return the history of `row` with the events `said`, each with `what` and what `with_event` takes."""
    history: list[dict[str, Any]] = row.history
    for event in said:
        history = with_event(history, at=at, **event)
    return history


def empty_copies(copies: QuerySet[Any], name: str, rows: Sequence[Timeout]) -> None:
    """Empty what `copies` of `rows` have of a person: their `body` is JSON, which shows the row as `name`."""
    for copy in copies.filter(timeout_id__in=[row.pk for row in rows]):
        body = json.loads(copy.body)
        emptied = {"key": body[name]["key"] and ERASED_KEY, "reason": "", "payload": None}
        body[name] |= {each: value for each, value in emptied.items() if each in body[name]}
        copies.filter(pk=copy.pk).update(body=json.dumps(body))


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


def error_details(error: BaseException, timeout: Timeout | None = None) -> dict[str, str]:
    """Return what is kept of an exception of `timeout`: type, message, and the end of the traceback.

    Scrubbed before it is capped, because a secret that is cut in two is not recognised.
    """
    return {
        "error": clean(type(error).__name__)[:MAX_REASON],
        "message": message_of(error, timeout)[:MAX_MESSAGE],
        "traceback": traceback_of(error, timeout)[-MAX_TRACEBACK:],
    }


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


logger = logging.getLogger("django_delayq")

Scrubber: TypeAlias = Callable[[str, Timeout | None], str]
UNREADABLE = "(its message cannot be read)"
WITHHELD = "(withheld: the scrubber failed)"
PACKAGE: Final = f"{Path(__file__).parent.parent}{os.sep}"
_LIBRARIES = (PACKAGE, *(f"{Path(package.__file__ or '').parent}{os.sep}" for package in (django, asgiref)), "<frozen")
_STANDARD = sysconfig.get_path("stdlib")
_DRIVERS = ("/psycopg/", "/psycopg_pool/", "/psycopg2/", "/MySQLdb/")


class Scrubbed(Exception):
    """Replaces an exception in the log; its message is the scrubbed traceback."""


def get_scrubber() -> Scrubber | None:
    """Return the callable in `DELAYQ["SCRUB"]`, or None. Raises ConfigError."""
    found = get_settings().scrub
    return None if found is None else cast("Scrubber", callable_of("SCRUB", found))


def scrubbed(text: str, timeout: Timeout) -> str:
    """Return a string of the application that the log is to show, scrubbed and clean."""
    return _scrubbed(lambda: text, UNREADABLE, timeout)


def message_of(error: BaseException, timeout: Timeout | None = None) -> str:
    """Return the message of `error`, scrubbed, clean and cut, also if its `__str__` fails."""
    return _cut(_scrubbed(lambda: str(error), UNREADABLE, timeout), MAX_MESSAGE)


def _cut(text: str, length: int) -> str:
    """Return the beginning of `text`, and how much is left out: some messages contain a whole page or file."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"


def traceback_of(error: BaseException, timeout: Timeout | None = None) -> str:
    """Return the traceback of `error` and its causes, scrubbed and clean, without locals."""
    unreadable = f"{type(error).__name__}: {UNREADABLE}\n"
    return _scrubbed(lambda: "".join(traceback.format_exception(error)), unreadable, timeout)


def shown(error: BaseException, timeout: Timeout | None = None) -> BaseException:
    """Return what a logger may get as `exc_info`: `error`, or with a scrubber a replacement that has only its message.

    A log handler may print or send everything an exception refers to: its causes, and the locals of its frames. An
    exception with a very long message is replaced, too.
    """
    text = traceback_of(error, timeout)
    is_as_it_is = get_settings().scrub is None and len(text) <= MAX_LOGGED
    return error if is_as_it_is else Scrubbed(_cut(text, MAX_TRACEBACK))


def is_user_code(file: str) -> bool:
    """Return whether a file belongs to the project or its packages: not to Python, Django, drivers or this package."""
    if file.startswith(_LIBRARIES) or any(driver in file for driver in _DRIVERS):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file or "dist-packages" in file


def keep_user_frames(error: BaseException) -> BaseException:
    """Remove from the tracebacks of `error` and of its causes all frames but those of the project; return `error`.

    For the log. The ledger keeps the complete traceback, so record it before. Without a frame of the project nothing is
    removed.
    """
    chain: dict[int, BaseException] = {}
    link: BaseException | None = error
    while link is not None and id(link) not in chain:
        chain[id(link)] = link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    reduced = [_of_user(each.__traceback__) for each in chain.values()]
    if reduced[0] is not None:
        for each, trace in zip(chain.values(), reduced, strict=True):
            each.__traceback__ = trace
    return error


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a copy of `trace` with the frames of the project only; None: it has none."""
    links, kept = list[TracebackType](), None
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    for each in reversed(links):
        if is_user_code(each.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _scrubbed(render: Callable[[], str], unreadable: str, timeout: Timeout | None) -> str:
    try:
        text = render()
    except Exception:  # noqa: BLE001 - code of the application
        text = unreadable
    try:
        scrub = get_scrubber()
        found = text if scrub is None else scrub(text, timeout)
        if isinstance(found, str):
            return clean(found)
        kind = f"returned {type(found).__name__}"
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - the attempt must be recorded
        kind = f"raised {type(failure).__name__}"
    # Without its own message and traceback, which may quote what must be scrubbed.
    logger.error("DELAYQ['SCRUB'] %s: a message is withheld", kind, extra={"event": "scrub_failed"})
    return WITHHELD
