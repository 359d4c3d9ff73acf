"""What is said of somebody else's exception, in the ledger and in the log: only through the setting `SCRUB`.

An exception's text may hold what nobody should read who reads the ledger: an address, a token, a card number. Locals
are never said. If the scrubber fails, nothing of the text is said at all: an attempt must not get lost for that.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

from django.utils.module_loading import import_string

from django_delayq.conf import ConfigError, get_settings

if TYPE_CHECKING:
    from django_delayq.models import Timeout

logger = logging.getLogger("django_delayq")

Scrubber: TypeAlias = "Callable[[str, Timeout | None], str]"
UNREADABLE = "(its message cannot be read)"
WITHHELD = "(withheld: the scrubber failed)"


class Scrubbed(Exception):
    """Stands for an exception where one is logged: its text is the scrubbed traceback."""


def get_scrubber() -> Scrubber | None:
    """The callable that `DELAYQ["SCRUB"]` means; None: there is none.

    Raises:
        ConfigError: it cannot be imported, or is not callable.
    """
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
    """What `error` says, scrubbed. An exception that cannot even say it must not stop the settling either."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - somebody else's __str__
        text = UNREADABLE
    return _scrubbed(text, timeout)


def traceback_of(error: BaseException, timeout: Timeout | None = None) -> str:
    """The traceback of `error` and its causes, scrubbed, without locals."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - as above
        text = f"{type(error).__name__}: {UNREADABLE}\n"
    return _scrubbed(text, timeout)


def shown(error: BaseException, timeout: Timeout | None = None) -> BaseException:
    """What to give a logger as `exc_info`: `error` itself, or with a scrubber a stand-in that has only its text.

    A log handler may print or send away whatever hangs on an exception: its causes, and the locals of its frames.
    """
    return error if get_settings().scrub is None else Scrubbed(traceback_of(error, timeout))


def _scrubbed(text: str, timeout: Timeout | None) -> str:
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
    except BaseException as failure:  # noqa: BLE001 - whatever it is: see the top
        kind = f"raised {type(failure).__name__}"
    # Its own message and traceback are not said: they may quote what it was to scrub.
    logger.error("DELAYQ['SCRUB'] %s: a text is withheld", kind, extra={"event": "scrub_failed"})
    return WITHHELD
