"""The formatter, and when the worker's command writes the log itself."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

import django_delayq
from django_delayq.logs import LOGGERS, BufferedHandler, Formatter, json_text, shown

LOGGER = logging.getLogger("django_delayq")


def record(message: str, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    return LOGGER.makeRecord("django_delayq.test", level, __file__, 1, message, (), None, extra=extra)


def configure(monkeypatch: pytest.MonkeyPatch, *handlers: logging.Handler) -> None:
    """Have the root logger only these handlers until the test ends."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(handlers))
    monkeypatch.setattr(LOGGER, "handlers", [])
    LOGGER.setLevel(logging.NOTSET)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\v", "\f", "\x85", "\u2028"])
def test_a_message_of_several_lines_cannot_imitate_a_record(end: str) -> None:
    lines = Formatter().format(record(f"no{end}2026-01-01 00:00:00.000+00:00 INFO forged")).splitlines()
    assert lines[1].startswith("    2026")


@pytest.mark.parametrize("code", ["\x1b[2K\x1b[G", "\x9b2K", "\b", "\x07"])
def test_a_message_does_not_control_the_terminal(code: str) -> None:
    found = record("It failed for %s")
    found.args = (f"{code}forged",)
    found.exc_text = f"ValueError: {code}forged"
    line = Formatter(colors={logging.INFO: lambda level: f"\x1b[32m{level}\x1b[m"}).format(found)
    assert code not in line
    assert "\x1b[32mINFO   \x1b[m It failed for  " in line and "\n    ValueError:  " in line


def test_json_does_not_control_the_terminal() -> None:
    for code in ("\x1b[2K", "\x9b2K", "\x7f"):
        text = json_text({"reason": f"é{code}"}, indent=2)
        assert code not in text and "é" in text
        assert json.loads(text) == {"reason": f"é{code}"}


OUTSIDE = "\x1b[2K\x9b1A\r\n2026-01-01 00:00:00 INFO forged\u2028\x85\v"


@pytest.mark.parametrize("name", ["django_delayq", *(f"django_delayq.{each}" for each in LOGGERS)])
def test_whatever_the_formatter_of_the_project_a_quoted_text_neither_forges_a_line_nor_controls_the_terminal(
    name: str,
) -> None:
    """As the example shop has it: nothing there knows of this library."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("{asctime} {levelname} {name}: {message} [{reason}]", style="{"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        raise ValueError(OUTSIDE) from LookupError(OUTSIDE)
    except ValueError as error:
        logger.warning("%s failed at attempt %d: %s", OUTSIDE, 3, error, exc_info=error, extra={"reason": OUTSIDE})
        logger.warning(OUTSIDE, extra={"reason": [OUTSIDE]})
    finally:
        logger.removeHandler(handler)
    written = stream.getvalue()
    assert written.count("forged") == 7 and "failed at attempt 3: " in written
    assert "\x1b" not in written and "\x9b" not in written
    first = [line for line in written.splitlines() if not line.startswith("    ")]
    assert [f" WARNING {name}: " in line for line in first] == [True, False, True]
    assert first[1].startswith("LookupError: ")


def test_every_logger_of_the_library_is_protected() -> None:
    sources = Path(django_delayq.__file__).parent.rglob("*.py")
    named = {
        name for source in sources for name in re.findall(r'getLogger\("django_delayq(.*?)"\)', source.read_text())
    }
    assert named == {"", *(f".{each}" for each in LOGGERS)}


def test_json_has_the_extra_attributes_with_datetimes_as_its_own_and_the_traceback() -> None:
    at = datetime(2026, 3, 1, 12, 0, 0, 250_900, UTC)
    try:
        raise ValueError("no")
    except ValueError:
        found = record("It failed", event="failed", object_id={1}, next_at=at, naive=at.replace(tzinfo=None))
        found.exc_info = sys.exc_info()
    read = json.loads(Formatter(as_json=True).format(found))
    assert (read["event"], read["level"], read["logger"]) == ("failed", "INFO", "django_delayq.test")
    assert read["object_id"] == "{1}"
    assert read["next_at"] == at.astimezone().isoformat(timespec="milliseconds")
    assert read["naive"] == "2026-03-01T12:00:00.250"
    assert read["traceback"].endswith("ValueError: no")
    assert not read.keys() & {"args", "msg", "exc_info", "pathname"}


@pytest.mark.parametrize(("level", "count"), [(None, 1), ("WARNING", 0), ("DEBUG", 2)])
def test_without_logging_a_handler_is_installed_until_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: str | None, count: int
) -> None:
    configure(monkeypatch)
    with shown(level):
        LOGGER.info("It began")
        LOGGER.debug("It waits")
    LOGGER.info("It ended")
    assert len(capsys.readouterr().err.splitlines()) == count
    assert (LOGGER.handlers, LOGGER.level) == ([], logging.NOTSET)


def test_handlers_and_levels_of_the_project_stay_unless_an_option_replaces_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = logging.StreamHandler(sys.stderr)
    own.setFormatter(logging.Formatter("own %(message)s"))
    configure(monkeypatch, own)
    with shown():
        LOGGER.info("It began")
        LOGGER.warning("It failed")
    with shown("INFO", as_json=True):
        LOGGER.info("It began")
    LOGGER.warning("It failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == lines[2] == "own It failed"
    assert json.loads(lines[1])["message"] == "It began"


class Stream(io.StringIO):
    """Notes each write, and that one has come."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.writes.append(text)
        self.written.set()
        return len(text)


def buffered() -> tuple[BufferedHandler, Stream]:
    stream = Stream()
    handler = BufferedHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler, stream


def test_lines_are_written_together_soon_and_a_warning_at_once_behind_them() -> None:
    handler, stream = buffered()
    with handler.lock or threading.Lock():  # the timer has to wait
        for word in ("one", "two"):
            handler.handle(record(word))
        assert stream.writes == []
    assert stream.written.wait(30)
    assert stream.writes == ["one\ntwo\n"]
    with handler.lock or threading.Lock():
        handler.handle(record("three"))
        handler.handle(record("four", logging.WARNING))
        assert stream.writes[1:] == ["three\nfour\n"]


def test_neither_a_stream_that_is_closed_nor_none_at_all_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, _ = buffered()
    handler.setStream(io.TextIOWrapper(io.BufferedReader(io.BytesIO())))  # nothing can be written to it
    handler.handle(record("lost", logging.ERROR))
    configure(monkeypatch)
    monkeypatch.setattr(sys, "stderr", None)
    with shown():
        LOGGER.error("It failed")
