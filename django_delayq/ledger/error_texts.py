"""What is kept and shown of an exception.

Its message may contain what readers of the ledger and of the log must not see: an address, a token, a card number. The
setting `SCRUB` filters it. Locals are never included. If the scrubber fails, the message is withheld, and the attempt
is recorded without it.
"""

from __future__ import annotations

import json
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import asgiref
import django
from django.db.models import QuerySet

from django_delayq.conf import callable_of, get_settings
from django_delayq.rounds.memory import ERASED_KEY, MAX_REASON, clean

if TYPE_CHECKING:
    from django_delayq.models import Timeout

MAX_MESSAGE = 1_000
"""Some libraries put whole responses into their messages: 40 of them must fit into a row."""
MAX_LOGGED = 50_000
"""A longer traceback contains a message of megabytes, and is logged as short as it is stored."""
MAX_TRACEBACK = 6000
"""The last frames, which name the cause, have room; a recursion of a thousand frames has none."""


def empty_copies(copies: QuerySet[Any], name: str, rows: Sequence[Timeout]) -> None:
    """Empty what `copies` of `rows` have of a person: their `body` is JSON, which shows the row as `name`."""
    for copy in copies.filter(timeout_id__in=[row.pk for row in rows]):
        body = json.loads(copy.body)
        emptied = {"key": body[name]["key"] and ERASED_KEY, "reason": "", "payload": None}
        body[name] |= {each: value for each, value in emptied.items() if each in body[name]}
        copies.filter(pk=copy.pk).update(body=json.dumps(body))


def error_details(error: BaseException, timeout: Timeout | None = None) -> dict[str, str]:
    """Return what is kept of an exception of `timeout`: type, message, and the end of the traceback.

    Scrubbed before it is capped, because a secret that is cut in two is not recognised.
    """
    return {
        "error": clean(type(error).__name__)[:MAX_REASON],
        "message": message_of(error, timeout)[:MAX_MESSAGE],
        "traceback": traceback_of(error, timeout)[-MAX_TRACEBACK:],
    }


logger = logging.getLogger("django_delayq")

Scrubber: TypeAlias = "Callable[[str, Timeout | None], str]"
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
