"""Format log records as lines with time and level, or as JSON, and show them where `LOGGING` does not.

Without Django, because `LOGGING` may name the formatter, and is read before the apps are loaded.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, Final

_STANDARD: Final = vars(logging.makeLogRecord({})).keys() | {"message", "asctime", "taskName"}
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def one_line(text: object) -> str:
    """Return a string without line breaks, which messages of databases have, and codes that control a terminal."""
    return _CONTROLS.sub(" ", str(text))


class Formatter(logging.Formatter):
    """Format a record as a line with local time, level and message, or as a JSON object that also has its `extra`.

    A message of an exception cannot imitate a record: the lines after the first one are indented, and codes that
    control a terminal are left out.

    Args:
        as_json: format JSON.
        colors: a function for each level that is shown in a color; it gets and returns the name of the level.
    """

    def __init__(self, *, as_json: bool = False, colors: Mapping[int, Callable[[str], str]] | None = None) -> None:
        super().__init__()
        self._as_json = as_json
        self._colors = colors or {}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).astimezone()
        trace = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        if not self._as_json:
            level = self._colors.get(record.levelno, str)(f"{record.levelname:<7}")
            lines = "\n".join(filter(None, (record.getMessage(), trace, record.stack_info))).splitlines()
            return f"{at.isoformat(' ', 'milliseconds')} {level} " + "\n    ".join(map(one_line, lines))
        found: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        return json_text(found | ({"traceback": trace} if trace else {}), default=_as_json)


def json_text(value: object, **options: Any) -> str:
    """Return JSON with letters as they are, but without codes that control a terminal."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _as_json(value: Any) -> str:
    """Return a datetime as `time` is written, and other values as strings."""
    if not isinstance(value, datetime):
        return str(value)
    return (value.astimezone() if value.tzinfo else value).isoformat(timespec="milliseconds")


@contextmanager
def shown(
    level: str | None = None, *, as_json: bool | None = None, colors: Mapping[int, Callable[[str], str]] | None = None
) -> Iterator[None]:
    """Write the records of this library to standard error until the block ends, unless `LOGGING` handles them.

    Args:
        level: the name of the least level; None: as `LOGGING` has it, or INFO if it handles nothing.
        as_json: the format. If it is given, handlers of `LOGGING` that write to the console get it, too.
        colors: as in `Formatter`.
    """
    logger, formatter = logging.getLogger("django_delayq"), Formatter(as_json=bool(as_json), colors=colors)
    with ExitStack() as undo:
        undo.callback(logger.setLevel, logger.level)
        if not logger.hasHandlers():
            level = level or "INFO"
            added = logging.StreamHandler(sys.stderr)
            added.setFormatter(formatter)
            logger.addHandler(added)
            undo.callback(logger.removeHandler, added)
        elif as_json is not None:
            for handler in _console_handlers(logger):
                undo.callback(handler.setFormatter, handler.formatter)
                handler.setFormatter(formatter)
        if level is not None:
            logger.setLevel(level)
        yield


def _console_handlers(logger: logging.Logger | None) -> Iterator[logging.StreamHandler[Any]]:
    """Yield the handlers for records of `logger` that write to the console."""
    while logger is not None:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr):
                yield handler
        logger = logger.parent if logger.propagate else None
