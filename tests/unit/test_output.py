"""Tables that fit the terminal, frames that replace each other, and one format of durations."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest
from django.core.management.base import OutputWrapper

from django_delayq.management.output import Screen, fold, table
from django_delayq.times.clock import duration_text

HEAD = ("id", "policy", "object", "reason")
ROW = (17, "shop.order.cancel_unpaid", "0f9d3c1e-8f6b-4b62-9c3f-0a4a7d2f6b11", "the provider did not answer in time")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "exact", "rounded"),
    [
        (timedelta(0), "0 s", "0 s"),
        (timedelta(milliseconds=250), "0.25 s", "0.25 s"),
        (timedelta(seconds=12.345678), "12.345678 s", "12 s"),
        (timedelta(minutes=30), "30 min", "30 min"),
        (timedelta(hours=1, seconds=5), "1 h 5 s", "1 h"),
        (timedelta(days=1, hours=12, minutes=3), "1 d 12 h 3 min", "1 d 12 h"),
        (timedelta(hours=-1, minutes=-30), "-1 h 30 min", "-1 h 30 min"),
    ],
)
def test_a_duration_has_one_format(value: timedelta, exact: str, rounded: str) -> None:
    assert (duration_text(value), duration_text(value, is_exact=False)) == (exact, rounded)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_table_fits_the_terminal_and_loses_nothing(width: int) -> None:
    lines = table(HEAD, [ROW, ROW], width)
    assert max(map(len, lines)) <= width
    rest = "".join(lines).replace(" ", "")
    for cell in (*HEAD, *ROW):
        for piece in fold(str(cell), 1):
            assert piece.replace(" ", "") in rest


def test_optional_columns_are_omitted_first_and_named() -> None:
    lines = table(("id", "lag", "policy"), [(1, "0.012 s", "shop.order.cancel_unpaid")], 30, optional=["lag"])
    assert lines == [
        "id  policy",
        "1   shop.order.cancel_unpaid",
        "Too wide for this terminal: lag",
    ]


def test_a_frame_is_drawn_over_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "6")
    out = Terminal()
    screen = Screen(OutputWrapper(out))
    screen.draw(["one", "two"])
    first = out.getvalue()
    screen.draw(["three"])
    second = out.getvalue().removeprefix(first)
    assert "\x1b[2F" not in first and "one\x1b[K\n" in first
    assert second.startswith("\x1b[2F") and second.endswith("three\x1b[K\n\x1b[J\x1b[?7h")
    screen.draw([str(number) for number in range(9)])
    assert out.getvalue().count("\n") == 3 + 5 and "... and 5 more lines" in out.getvalue()
