"""Messages and tracebacks of exceptions for the ledger and the log, filtered by the setting `SCRUB`.

An exception's message may contain what readers of the ledger must not see: an address, a token, a card number. Locals
are never included. If the scrubber fails, the message is withheld, and the attempt is recorded without it.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias, cast

import asgiref
import django
from django.utils.module_loading import import_string

from django_delayq.conf import ConfigError, get_settings
from django_delayq.models import Timeout

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
    if isinstance(found, str):
        try:
            found = import_string(found)
        except ImportError as error:
            raise ConfigError(f"DELAYQ['SCRUB'] cannot be imported: {error}") from error
        if not callable(found):
            raise ConfigError("DELAYQ['SCRUB'] names something that is not callable.")
    return cast("Scrubber | None", found)


def message_of(error: BaseException, timeout: Timeout | None = None) -> str:
    """Return the scrubbed message of `error`, also if its `__str__` fails."""
    return _scrubbed(lambda: str(error), UNREADABLE, timeout)


def traceback_of(error: BaseException, timeout: Timeout | None = None) -> str:
    """Return the scrubbed traceback of `error` and its causes, without locals."""
    unreadable = f"{type(error).__name__}: {UNREADABLE}\n"
    return _scrubbed(lambda: "".join(traceback.format_exception(error)), unreadable, timeout)


def shown(error: BaseException, timeout: Timeout | None = None) -> BaseException:
    """Return what a logger may get as `exc_info`: `error`, or with a scrubber a replacement that has only its message.

    A log handler may print or send everything an exception refers to: its causes, and the locals of its frames.
    """
    return error if get_settings().scrub is None else Scrubbed(traceback_of(error, timeout))


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
        if scrub is None:
            return text
        found = scrub(text, timeout)
        if isinstance(found, str):
            return found
        kind = f"returned {type(found).__name__}"
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - the attempt must be recorded
        kind = f"raised {type(failure).__name__}"
    # Without its own message and traceback, which may quote what must be scrubbed.
    logger.error("DELAYQ['SCRUB'] %s: a message is withheld", kind, extra={"event": "scrub_failed"})
    return WITHHELD
