"""Messages and tracebacks of exceptions for the ledger and the log, filtered by the setting `SCRUB`.

An exception's message may contain what readers of the ledger must not see: an address, a token, a card number. Locals
are never included. If the scrubber fails, the message is withheld, and the attempt is recorded without it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TypeAlias, cast

from django.utils.module_loading import import_string

from django_delayq.conf import ConfigError, get_settings
from django_delayq.models import Timeout

logger = logging.getLogger("django_delayq")

Scrubber: TypeAlias = Callable[[str, Timeout | None], str]
UNREADABLE = "(its message cannot be read)"
WITHHELD = "(withheld: the scrubber failed)"


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
