"""What falls due in the coming 24 hours, drawn as bars; the same as a table, for whoever does not see them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from django.utils import timezone

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH: Final = 480
HEIGHT: Final = 64
STEP: Final = 20
BAR: Final = 16
EVERY: Final = 6


@dataclass(frozen=True, slots=True)
class Bar:
    """One hour: its place in the drawing, and its row in the table."""

    x: int
    y: int
    height: int
    hour: str
    count: str
    is_named: bool
    """Whether the axis names this hour; it has no room for all of them."""


@dataclass(frozen=True, slots=True)
class Chart:
    """The coming hours of one policy."""

    bars: tuple[Bar, ...]
    highest: str
    total: str
    is_empty: bool
    width: int = WIDTH
    height: int = HEIGHT
    bar: int = BAR


def chart(hours: Sequence[tuple[int, bool]], now: datetime) -> Chart:
    """The drawing of `hours`: of each how many fall due, and whether there are more than that."""
    most = max((value for value, _capped in hours), default=0)
    bars = []
    for place, (value, capped) in enumerate(hours):
        height = max(1, round(value * HEIGHT / most)) if value else 0
        moment = now + timedelta(hours=place)
        shown = timezone.localtime(moment) if timezone.is_aware(moment) else moment
        words = f"{value}+" if capped else str(value)
        bars.append(Bar(place * STEP, HEIGHT - height, height, f"{shown:%H:%M}", words, place % EVERY == 0))
    is_capped = any(capped for _value, capped in hours)
    total = f"{sum(value for value, _capped in hours)}{'+' if is_capped else ''}"
    highest = next((bar.count for bar, (value, _) in zip(bars, hours, strict=True) if value == most), "0")
    return Chart(tuple(bars), highest, total, is_empty=most == 0)
