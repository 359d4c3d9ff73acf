"""The table of events in docs/events.md is that of the columns which the tests have found."""

from __future__ import annotations

from tools import states


def test_the_page_is_written_from_what_the_events_do() -> None:
    assert states.PAGE.read_text(encoding="utf-8") == states.page(), "run `python tools/states.py page`"


def test_a_cell_names_the_columns_of_which_it_is_so_unless_it_is_so_of_all() -> None:
    assert [states.cell(group) for group in (None, {"set": ["a"], "reset": ["b"]}, {"reset": ["a"]})] == [
        "",
        "set",
        "reset",
    ]
    assert states.cell({"set": ["a"], "reset": ["b", "c"], "keep": ["d"]}) == "set `a`, reset `b`, `c`"
