"""The table of events in docs/events.md is that of the columns which the tests have found."""

from __future__ import annotations

from tools import states


def test_the_page_is_written_from_what_the_events_do() -> None:
    assert states.PAGE.read_text(encoding="utf-8") == states.page(), "run `python tools/states.py page`"
