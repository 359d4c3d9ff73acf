"""What an event does to each column of a row: keep, reset or set it. As text, by groups of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from django_delayq.rounds.columns import DEFAULTS, GROUPS

KEEP, RESET, SET, UNKNOWN = "keep", "reset", "set", "?"

Verdicts = dict[str, str]
"""What was done to each column. `UNKNOWN`: it had its default, and has it still."""


def verdicts(before: Mapping[str, Any], after: Mapping[str, Any]) -> Verdicts:
    """Return what was done to each column; `before` is empty if there was no row."""
    return {name: _verdict(before.get(name, ...), value, DEFAULTS[name]) for name, value in after.items()}


def _verdict(before: Any, after: Any, default: Any) -> str:
    is_default = after == default
    if before == after:
        return UNKNOWN if is_default else KEEP
    return RESET if is_default else SET


def merged(found: Sequence[Verdicts]) -> Verdicts:
    """Return what ways of one event do; a column that some set and some reset, by what the caller gives, is set.

    AssertionError: one keeps what another one changes.
    """
    result, disagreed = {}, {}
    for name in found[0]:
        of_column = {each[name] for each in found} - {UNKNOWN}
        if KEEP in of_column and len(of_column) > 1:
            disagreed[name] = [each[name] for each in found]
        result[name] = SET if SET in of_column else next(iter(of_column), UNKNOWN)
    assert not disagreed, disagreed
    return result


def lines(found: Verdicts) -> Iterator[str]:
    """Yield a line for each group of which something changes: what is set, reset and kept."""
    for group, names in GROUPS.items():
        by = {each: [name for name in names if found[name] == each] for each in (SET, RESET, KEEP)}
        if by[SET] or by[RESET]:
            yield f"  {group}: " + "; ".join(f"{each} {' '.join(of)}" for each, of in by.items() if of)


def blocks(text: Iterable[str]) -> dict[str, list[str]]:
    """Return the lines of each event."""
    found: dict[str, list[str]] = {}
    for line in text:
        if line.startswith("  "):
            found[next(reversed(found))].append(line)
        elif line.strip():
            found[line.strip()] = []
    return found
