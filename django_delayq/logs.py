"""Format log records as lines with time and level, or as JSON, and show them where `LOGGING` does not.

Without Django, because `LOGGING` may name the formatter, and is read before the apps are loaded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_STANDARD: Final = vars(logging.makeLogRecord({})).keys() | {"message", "asctime", "taskName"}
DELAY_SECONDS: Final = 0.05
"""How late a line is at most: less would write few lines together, and a person notices more."""
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
LOGGERS: Final = ("arming", "engine", "firing", "metrics", "operations", "outbox", "redis", "worker")
"""The loggers of this library, below `django_delayq`."""


def one_line(text: object) -> str:
    """Return a string without line breaks, which messages of databases have, and codes that control a terminal."""
    return _CONTROLS.sub(" ", str(text))


def _indented(text: str) -> str:
    """Return lines of which none but the first can imitate a record, without codes that control a terminal."""
    return "\n    ".join(map(one_line, text.splitlines()))


def protect() -> None:
    """Let no record of this library forge lines or control a terminal, whatever formatter `LOGGING` names.

    Records quote what users wrote: reasons, and messages of exceptions.
    """
    for name in ("django_delayq", *(f"django_delayq.{each}" for each in LOGGERS)):
        logging.getLogger(name).addFilter(_cleaned)  # once, also if it is called again


def _cleaned(record: logging.LogRecord) -> bool:
    with suppress(Exception):  # of a `__str__`, which `logging` reports when it formats the record
        named = vars(record).keys() - _STANDARD | {"msg", "args"}
        vars(record).update({name: _clean(vars(record)[name]) for name in named})
        if record.exc_info:
            record.exc_text = _indented(logging.Formatter().formatException(record.exc_info))
    return True


def _clean(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_clean, value))
    if type(value) in (int, float) or (type(value) is str and value.isprintable()):
        return value  # as nearly all of the records of firings
    return value if (text := str(value)) == (line := one_line(text)) else line


class Formatter(logging.Formatter):
    """Format a record as a line with local time, level and message, or as a JSON object that also has its `extra`.

    A message of an exception cannot imitate a record: the lines after the first one are indented, and codes that
    control a terminal are left out.

    Args:
        as_json: format JSON.
        colors: a function for each level that is shown in a color; it gets and returns the name of the level.
    """

    prefix = ""
    """What messages of lines begin with: in a process beside others, its number."""

    def __init__(self, *, as_json: bool = False, colors: Mapping[int, Callable[[str], str]] | None = None) -> None:
        super().__init__()
        self._as_json = as_json
        self._colors = colors or {}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).astimezone()
        trace = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        if not self._as_json:
            level = self._colors.get(record.levelno, str)(f"{record.levelname:<7}")
            text = "\n".join(filter(None, (record.getMessage(), trace, record.stack_info)))
            return f"{at.isoformat(' ', 'milliseconds')} {level} {self.prefix}{_indented(text)}"
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


class BufferedHandler(logging.StreamHandler[TextIO]):
    """Write what is less than a warning after `DELAY_SECONDS`, many lines together; all else at once.

    Python flushes each line of standard error, for which the threads of a worker wait in turn: that took a tenth of a
    backlog. A process that is killed loses the lines of that time. What was written earlier never comes later.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._begin()
        # Else each child would write the lines of its parent, too, and wait for a timer that only the parent has.
        os.register_at_fork(before=self.flush, after_in_child=self._begin)

    def _begin(self) -> None:
        self._lines: list[str] = []
        self._is_waiting = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + self.terminator)
            if record.levelno >= logging.WARNING:
                self.flush()
            elif not self._is_waiting:
                self._is_waiting = True
                self._flush_later()
        except Exception:  # noqa: BLE001 - as each handler of `logging` does
            self.handleError(record)

    def _flush_later(self) -> None:
        timer = threading.Timer(DELAY_SECONDS, self.flush)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the interpreter ends
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        with self.lock or nullcontext():
            lines, self._lines, self._is_waiting = self._lines, [], False
            # AttributeError: a process without standard error has None. It is closed, where this would be reported.
            with suppress(AttributeError, OSError, ValueError):
                for first in range(0, len(lines), 10):  # so few bytes that no other process writes in between
                    self.stream.write("".join(lines[first : first + 10]))
                super().flush()


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
            added = BufferedHandler(sys.stderr)
            undo.callback(added.flush)
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
