"""Statistics of measured samples, and ratios of two contestants in one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """The median of some samples, with the smallest and the largest of them."""

    median: float
    least: float
    most: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Return median, minimum, maximum and count. Raises ValueError without samples."""
    if not samples:
        raise ValueError("There are no samples.")
    return Spread(statistics.median(samples), min(samples), max(samples), len(samples))


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least `part` (0 to 1) of `values` do not exceed (nearest rank)."""
    if not values:
        raise ValueError("There are no values.")
    ordered = sorted(values)
    rank = -(-len(ordered) * part // 1)  # rounded up
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


def number(value: float) -> str:
    """Return `value` with three significant digits, and thousands separated: 1,234 or 12.3 or 0.123."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"
