"""Output of the commands: tables that fit the terminal, frames of `--watch`, datetimes, durations and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from itertools import zip_longest
from typing import Any, Final

from django.core.management.base import OutputWrapper

from django_delayq.ledger.controls import PolicyState
from django_delayq.logs import json_text, one_line
from django_delayq.policy.options import Rate
from django_delayq.times import clock
from django_delayq.times.clock import duration_text
from django_delayq.times.lengths import length_text

Paint = Callable[[str], str]
Cells = Sequence[object]
GAP: Final = "  "
_PIECES = re.compile(r"[^\s.-]*[\s.-]?")


class Encodable:
    """A stream that escapes, as Python's literals do, what its encoding does not have.

    Otherwise a key or a reason in another script ends a command with UnicodeEncodeError where the output is in ASCII or
    Latin-1, as it may be under cron.
    """

    def __init__(self, out: Any) -> None:
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> None:
        encoding = encoding_of(self._out)
        self._out.write(text.encode(encoding, "backslashreplace").decode(encoding))


def encoding_of(out: Any) -> str:
    """Return the encoding of a stream; UTF-8 for one that takes every string."""
    return getattr(out, "encoding", None) or "utf-8"


class Painted(str):
    """A string that a table prints in a colour."""

    paint: Paint

    def __new__(cls, text: object, paint: Paint = str) -> Painted:
        painted = super().__new__(cls, text)
        painted.paint = paint
        return painted


def terminal_width(out: OutputWrapper) -> int | None:
    """Return the columns of the terminal; None: the output is a file or a pipe, and lines may have any length."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def table(head: Cells, rows: Sequence[Cells], width: int | None = None, *, optional: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        head: the headings, each different. They and the cells may be `Painted`.
        rows: the cells.
        width: columns of the terminal. In a wider table, cells continue on the next line, at blanks, dots and hyphens.
            Words are never cut, so a very narrow terminal wraps the lines. None: no limit.
        optional: headings of columns that are omitted first, in this order; the last line names them.
    """
    cells = [[Painted(one_line(cell), getattr(cell, "paint", str)) for cell in row] for row in (head, *rows)]
    columns: dict[str, Sequence[Painted]] = {column[0]: column for column in zip(*cells, strict=True)}
    omitted = []
    for name in optional:
        if width is not None and _width_of([max(map(len, column)) for column in columns.values()]) > width:
            omitted.append(name)
            del columns[name]
    widths = _widths(list(columns.values()), width)
    lines = [line for row in zip(*columns.values(), strict=True) for line in _lines_of(row, widths)]
    return [*lines, f"Too wide for this terminal: {', '.join(omitted)}"] if omitted else lines


def _width_of(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _widths(columns: Sequence[Sequence[str]], limit: int | None) -> list[int]:
    """Return the widths of `columns`: the widest is narrowed until all fit, or no cell can be divided any more."""
    widths = [max(map(len, column)) for column in columns]
    divisible = set(range(len(columns)))
    while limit is not None and divisible and (excess := _width_of(widths) - limit) > 0:
        widest = max(divisible, key=lambda place: widths[place])
        second = max((widths[place] for place in divisible - {widest}), default=0)
        wanted = max(widths[widest] - excess, second - 1)  # not blank by blank: a table may have thousands of cells
        folded = max(len(line) for cell in set(columns[widest]) for line in fold(cell, wanted))
        if folded < widths[widest]:
            widths[widest] = folded
        else:
            divisible.remove(widest)
    return widths


def fold(text: str, width: int) -> list[str]:
    """Return `text` as lines of at most `width` characters, divided after blanks, dots and hyphens only."""
    lines = [""]
    for piece in _PIECES.findall(text):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _lines_of(row: Sequence[Painted], widths: Sequence[int]) -> Iterable[str]:
    folded = [fold(cell, width) for cell, width in zip(row, widths, strict=True)]
    for parts in zip_longest(*folded, fillvalue=""):
        cells = zip(row, parts, widths, strict=True)
        padded = ((cell.paint(part) if part else "") + " " * (width - len(part)) for cell, part, width in cells)
        yield GAP.join(padded).rstrip()


@dataclasses.dataclass
class Screen:
    """Draw frame after frame: on a terminal in the same place, otherwise one below the other."""

    out: OutputWrapper
    _drawn: int = 0

    def draw(self, lines: Sequence[str]) -> None:
        """Draw the next frame; of one that is higher than the terminal, its first lines."""
        if not self.out.isatty():
            self.out.write("\n".join([*lines, "", ""]))
        else:
            height = shutil.get_terminal_size().lines - 1  # the cursor is below the last line
            if len(lines) > height:
                lines = [*lines[: height - 1], f"... and {len(lines) - height + 1} more lines"]
            body = "".join(f"{line}\x1b[K\n" for line in lines)
            # Up to the first line; without wrapping, so that a long line remains one; then clear what is below.
            begin = f"\x1b[{self._drawn}F" if self._drawn else ""
            self.out.write(f"{begin}\x1b[?7l{body}\x1b[J\x1b[?7h", ending="")
            self._drawn = len(lines)
        self.out.flush()


def local(at: datetime) -> str:
    """Return local time to the second with its zone."""
    return f"{clock.local(at):%Y-%m-%d %H:%M:%S %Z}".rstrip()


def seconds(value: float | None) -> str:
    """Return a number of seconds as a duration; "-" for None."""
    return "-" if value is None else duration_text(timedelta(seconds=value), is_exact=False)


def rate_text(rate: Rate) -> str:
    """Return `20 in 1 s`, or `20 in 1 s by merchant_id`."""
    return f"{rate.count} in {duration_text(rate.per)}{f' by {rate.by}' if rate.by else ''}"


def guards_of(state: PolicyState) -> dict[str, tuple[str, str]]:
    """Return the setting of each guard rail, such as `skip after 6 h` or `off`, and its actor; empty: as declared."""
    late, brake, shadow = state.late, state.brake, state.shadow
    texts = {
        "late": f"{late.then} after {length_text(late.after)}" if late else "off",
        "brake": f"{brake.most} in {duration_text(brake.per)}" if brake else "off",
        "shadow": f"{shadow} %" if shadow else "off",
    }
    return {guard: (text, state.set_by(guard)) for guard, text in texts.items()}


def stop_of(state: PolicyState) -> str:
    """Return `paused until 2026-03-01 18:00:00 UTC: outage`, or `running`."""
    if not state.is_stopped:
        return "running"
    until = f" until {local(state.until)}" if state.until else ""
    return f"{state.stop}{until}{f': {state.reason}' if state.reason else ''}"


def as_json(value: Any, encoding: str = "utf-8") -> str:
    """Return JSON: dates and datetimes in ISO format, durations in seconds, dataclasses and named tuples as objects.

    If `encoding` does not have all of its letters, they are escaped as JSON has them, which `Encodable` does not.
    """
    text = json_text(_plain(value), indent=2)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return re.sub(r"[^\x00-\x7f]", lambda letter: json.dumps(letter[0])[1:-1], text)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, date):  # or a datetime
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, PolicyState):
            policy = fields.pop("policy")
            in_force = {name: getattr(value, name) for name in ("delay", "late", "brake", "shadow", "is_braked")}
            declared = {"label": value.label, "model": policy.concrete_model._meta.label, "limits": policy.limits}
            fields = {**declared, **in_force, **fields}
        value = fields
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
