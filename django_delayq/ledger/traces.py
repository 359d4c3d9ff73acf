"""The functions in `DELAYQ["AROUND"]`, and the trace context with which a round is written.

Such a function gets a policy and its timeouts, and returns a context manager, which is entered around a call of the
handler: see `firing.handler`. It may have an attribute `get_trace`, a function that returns the `traceparent` of W3C of
its caller, or "". The column `trace` stores it, so that a firing can refer to the code that has scheduled it, weeks
before and in another process.
"""

from __future__ import annotations

import functools
import logging
import re
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias, cast

from django_delayq.backoff import LogInterval
from django_delayq.conf import callable_of, get_settings
from django_delayq.ledger.error_texts import shown
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq")

Around: TypeAlias = Callable[[TimeoutPolicy[Any], Sequence[Timeout]], AbstractContextManager[object]]
CONTRIB: Final = "django_delayq.contrib."
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_log_interval = LogInterval()
"""How often an error is logged that would otherwise be logged with each timeout that is scheduled."""


def get_around() -> Sequence[Around]:
    """Return the functions in `DELAYQ["AROUND"]`. Raises ConfigError."""
    return [_callable_at(each) if isinstance(each, str) else each for each in get_settings().around]


@functools.cache
def _callable_at(path: str) -> Around:
    extra = path.removeprefix(CONTRIB).partition(".")[0]  # its module has the name of the extra
    hint = f". Install django-delayq[{extra}]." if path.startswith(CONTRIB) else ""
    return cast("Around", callable_of("AROUND", path, hint))


def attempt_of(row: Timeout) -> int:
    """Return the number of the attempt that a call for `row` belongs to; `confirm` is asked while it is pending."""
    return row.attempts + is_asked(row)


def is_asked(row: Timeout) -> bool:
    """Return whether a call for `row` asks the `confirm` function, and is not that of the handler."""
    return row.state == Timeout.State.PENDING


def current_trace() -> str:
    """Return the `traceparent` of the calling code, for a round that it begins; "" if there is none.

    It needs no query. An error is logged once a minute: what is observed must not fail because of the observer.
    """
    if not get_settings().around:
        return ""
    try:
        for around in get_around():
            get_trace = getattr(around, "get_trace", None)
            trace = get_trace() if get_trace is not None else ""
            if trace and not _TRACEPARENT.fullmatch(trace):
                raise ValueError(f"{trace!r} is not a traceparent")
            if trace:
                return str(trace)
    except (Exception, SystemExit, CancelledError) as error:
        if _log_interval.is_over("trace"):
            words = "The trace of a timeout is not known, because of DELAYQ['AROUND']"
            logger.error(words, exc_info=shown(error), extra={"event": "around_failed"})
    return ""
