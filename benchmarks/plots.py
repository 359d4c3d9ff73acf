"""Bar charts as SVG, by hand: a chart of at most twenty bars needs no library."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from benchmarks.figures import Spread, number

WIDTH, LABEL, BAR, GAP, TOP = 720, 230, 18, 8, 34


def bars(title: str, values: Mapping[str, Spread], first: str) -> str:
    """Return a chart: one bar of the median for each name, and a line from the smallest to the largest sample.

    Args:
        title: what the bars show, with the unit.
        values: by name, from top to bottom.
        first: names that begin like this are highlighted.
    """
    room = WIDTH - LABEL - 90
    scale = room / (max((max(one.most, one.median) for one in values.values()), default=0) or 1)
    height = TOP + len(values) * (BAR + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        '  font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="22" font-weight="bold">{escape(title)}</text>',
    ]
    for row, (name, one) in enumerate(values.items()):
        y, middle = TOP + row * (BAR + GAP), TOP + row * (BAR + GAP) + BAR / 2
        colour = "#0b7285" if name.startswith(first) else "#adb5bd"
        least, median, most = (max(0.0, value) * scale for value in (one.least, one.median, one.most))
        lines += [
            f'<text x="{LABEL - 8}" y="{middle + 5:.0f}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{max(1, median):.1f}" height="{BAR}" fill="{colour}"/>',
            f'<line x1="{LABEL + least:.1f}" x2="{LABEL + most:.1f}" y1="{middle}" y2="{middle}" stroke="#212529"/>',
            f'<text x="{LABEL + max(median, most) + 6:.1f}" y="{middle + 5:.0f}">{number(one.median)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
