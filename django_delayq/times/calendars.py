"""Working calendars: when somewhere is open, and which days are working days. Imports no Django.

`Calendar` is what spans need from a calendar, also from one of another package. `WorkingHours` is the built-in one:
windows of local wall time for each day of the week, holidays, and special days with windows of their own.

All results are aware datetimes in UTC. An instant is open if its local wall time is within a window of its day, or
within a window of the day before that crosses midnight. So a window can be open twice, or not at all, on a day on which
the clocks change. The windows of a date are computed once; whether it is a holiday or a special day is asked each time,
because these are data that may change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, Final, Protocol, TypeGuard
from zoneinfo import ZoneInfo

from django_delayq.exceptions import InvalidDelay, suggestion

MAX_CLOSED_DAYS: Final = 366
"""A calendar that is closed for longer is a mistake: without a limit, a search in it would not end."""
MAX_SEARCHED_DAYS: Final = 140 * 366
"""No two supported datetimes are further apart. Without a limit, a minute a week is searched for up to year 9999."""
MAX_CACHED_DAYS: Final = 4096
"""Days of eleven calendars for a year, some 0.5 kB each. The cache must not grow with the age of a process."""
_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\s*-\s*(?:([01]\d|2[0-3]):([0-5]\d)|24:00)")
_DAY, _SECOND, _MIDNIGHT = timedelta(days=1), timedelta(seconds=1), 24 * 60  # the last in minutes, as windows are

Window = tuple[int, int]
"""Beginning and end of a window, in minutes since the midnight before its beginning. The end is not part of it."""
Week = tuple[tuple[Window, ...], ...]
Piece = tuple[datetime, datetime]
"""An opening and the closing after it, in UTC."""
Hours = str | Sequence[str] | None
"""The windows of one day as they are given; None: it is closed."""


class Calendar(Protocol):
    """What a span needs from a calendar. Datetimes are aware; results are in UTC.

    A calendar may have an attribute `zone`, a tzinfo or the name of one, in which its working days are counted.
    Without it, that is the setting TIME_ZONE.
    """

    def add(self, start: datetime, seconds: float) -> datetime:
        """Return the end of `seconds` of open time from `start`; negative: backwards.

        A `start` outside opening hours counts from the next opening (backwards: from the closing before). The result
        is a closing rather than the next opening. 0 seconds: `start` if it is open, otherwise the next opening.
        """

    def between(self, a: datetime, b: datetime) -> float:
        """Return the open seconds from `a` to `b`, negative if `b` is before `a`."""

    def next_open(self, moment: datetime) -> datetime:
        """Return `moment` if it is open, otherwise the next opening. An opening is open, a closing is not."""

    def nth_day(self, day: date, n: int) -> date:
        """Return the n-th working day after `day`, or before it if n is negative.

        0: `day` if it is a working day, otherwise the next one.
        """


def is_calendar(value: object) -> TypeGuard[Calendar]:
    """Return whether `value` has the methods of a `Calendar`. A class is not a calendar."""
    methods = ("add", "between", "next_open", "nth_day")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class WorkingHours:
    """A calendar of weekly opening hours in one time zone, without holidays.

    Two are equal if zone and hours are, and if their holidays and special days are the same objects.

    Args:
        zone: an IANA name, such as "Europe/Berlin", or a tzinfo.
        hours: days to windows: {"mon-fri": ("09:00-12:30", "13:00-17:00"), "sat": "10:00-14:00"}. Days are "mon",
            "mon,wed", "mon-fri", or "fri-mon" across the weekend. "22:00-06:00" crosses midnight and belongs to the
            day on which it begins, also concerning holidays. "00:00-24:00" is a whole day.
        holidays: dates on which no window begins: a container of dates, such as `holidays.Germany()` of the package
            `holidays`, or a callable from a date to a bool. It is asked each time.
        special: the windows of single days, which count instead of those of the week, also on a holiday; None: that day
            is closed. A mapping of dates: {date(2026, 12, 24): "09:00-13:00", date(2026, 12, 31): None}, or a callable
            from a date, which raises KeyError for a day that is not special. It is asked each time. Where a window that
            crosses midnight overlaps one of the next day, that time counts once.

    Raises:
        TypeError, ValueError: an argument of another type; an unknown zone or day; a day that is named twice; windows
            that are empty or overlap. What a callable returns is checked when it is asked.
    """

    zone: tzinfo
    week: Week
    holidays: Container[date] | Callable[[date], bool] = field(compare=False)
    special: Mapping[date, Hours] | Callable[[date], Hours] | None = field(compare=False)
    _is_holiday: Callable[[date], bool] = field(hash=False)
    _special_hours: Callable[[date], Hours] | None = field(hash=False)

    def __init__(
        self,
        zone: str | tzinfo,
        hours: Mapping[str, str | Sequence[str]],
        holidays: Container[date] | Callable[[date], bool] = (),
        special: Mapping[date, Hours] | Callable[[date], Hours] | None = None,
    ) -> None:
        object.__setattr__(self, "zone", parse_zone(zone))
        object.__setattr__(self, "week", _parse_week(hours))
        object.__setattr__(self, "holidays", holidays)
        object.__setattr__(self, "_is_holiday", _asked("holidays", holidays, Container, "__contains__"))
        object.__setattr__(self, "special", special)
        hours_of = None if special is None else _asked("special", special, Mapping, "__getitem__")
        object.__setattr__(self, "_special_hours", hours_of)
        for day in special if isinstance(special, dict) else ():
            self._windows(day)  # refuses wrong ones now, not for the first object

    def add(self, start: datetime, seconds: float) -> datetime:
        """Return the end of `seconds` of open time from `start`, as `Calendar.add` describes.

        Raises:
            InvalidDelay: the calendar is closed for a year.
            OverflowError: the end is more than 140 years away, or not within the years 1 to 9999.
        """
        start, left = _in_utc(start), timedelta(seconds=abs(seconds))
        for opening, closing in self._pieces(start, 1 if seconds >= 0 else -1):
            if seconds >= 0 and closing > start:
                begin = max(opening, start)
                if left <= closing - begin:
                    return begin + left
                left -= closing - begin
            elif seconds < 0 and opening < start:
                end = min(closing, start)
                if left <= end - opening:
                    return end - left
                left -= end - opening
        raise OverflowError(f"{seconds} s of open time from {start} are more than 140 years.")

    def between(self, a: datetime, b: datetime) -> float:
        """Return the open seconds from `a` to `b`, negative if `b` is before `a`."""
        a, b = _in_utc(a), _in_utc(b)
        if b < a:
            return -self.between(b, a)
        days = (b - a).days + 4  # the parts of two, and one before and after them
        parts = (min(closing, b) - max(opening, a) for opening, closing in self._pieces(a, 1, days))
        return sum((part for part in parts if part > timedelta(0)), timedelta(0)).total_seconds()

    def next_open(self, moment: datetime) -> datetime:
        """Return `moment` if it is open, otherwise the next opening. Raises InvalidDelay if there is none in a year."""
        return self.add(moment, 0)

    def nth_day(self, day: date, n: int) -> date:
        """Return the n-th working day after (negative: before) `day`; 0: `day`, or else the next one.

        A working day is one on which a window begins: neither a holiday nor a special day that is closed.

        Raises:
            InvalidDelay: there is no working day for a year.
        """
        if n == 0:
            return day if self._windows(day) else self.nth_day(day, 1)
        step = _DAY if n > 0 else -_DAY
        for _ in range(abs(n)):
            for _ in range(MAX_CLOSED_DAYS):
                day += step
                if self._windows(day):
                    break
            else:
                raise self._never_open(day)
        return day

    def _windows(self, day: date) -> tuple[Window, ...]:
        """Return the windows that begin on `day`."""
        if self._special_hours is not None:
            with suppress(KeyError):
                return _parse_windows(str(day), () if (hours := self._special_hours(day)) is None else hours)
        windows = self.week[day.weekday()]
        return windows if windows and not self._is_holiday(day) else ()

    def _pieces(self, start: datetime, step: int, days: int | None = None) -> Iterator[Piece]:
        """Yield the pieces around and after `start` in order; with step -1: before it, the latest first.

        Those of windows that begin on one of so many `days`, the first one being the day before that of `start`. By
        default, search: as long as any end is supported, and until the calendar is closed for a year.
        """
        day, stride = start.astimezone(self.zone).date() - step * _DAY, step * _DAY
        held: tuple[Piece, ...] = ()  # until it is certain that none of the next day is before them
        closed = 0
        for _ in range(MAX_SEARCHED_DAYS if days is None else days):
            found = _pieces_of(self.zone, self._windows(day), day)
            if held and found and held[0][0] < found[-1][1] and found[0][0] < held[-1][1]:
                # The clocks went back after midnight, into the windows of a day, or a special day has other windows.
                held = _united(held + found)
            else:
                yield from held[::step]
                held = found
            closed = 0 if found else closed + 1
            if closed > MAX_CLOSED_DAYS and days is None:
                raise self._never_open(day)
            day += stride
        yield from held

    def _never_open(self, day: date) -> InvalidDelay:
        return InvalidDelay(
            f"The calendar {self} is closed for {MAX_CLOSED_DAYS} days up to {day}: check holidays and special days."
        )

    @property
    def text(self) -> str:
        """The hours and the zone: `mon-fri 09:00-12:30, 13:00-17:00; sat 10:00-14:00, Europe/Berlin`."""
        parts = []
        for windows, group in groupby(range(7), key=self.week.__getitem__):
            if windows:
                days = [_DAYS[weekday] for weekday in group]
                parts.append(f"{'-'.join(dict.fromkeys((days[0], days[-1])))} {', '.join(map(_window_text, windows))}")
        return f"{'; '.join(parts)}, {self.zone}"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<WorkingHours {self.text}>"


@lru_cache(maxsize=MAX_CACHED_DAYS)
def _pieces_of(zone: tzinfo, windows: tuple[Window, ...], day: date) -> tuple[Piece, ...]:
    """Return when the windows that begin on `day` are open, sorted."""
    midnight, pieces = datetime(day.year, day.month, day.day), []  # noqa: DTZ001 - local wall time
    for window in windows:
        begin, end = (midnight + timedelta(minutes=minutes) for minutes in window)
        offsets = {*_offsets(begin, zone), *_offsets(end, zone)}
        least, most = min(offsets), max(offsets)
        if least == most:
            pieces.append((_utc(begin - least), _utc(end - least)))
            continue
        # The clocks change in between: one piece before, and one after.
        first, last = _utc(begin - most), _utc(end - least)
        change = _change(zone, first, last)
        before, after = _offset_at(first, zone), _offset_at(last, zone)
        pieces.append((_utc(begin - before), min(_utc(end - before), change)))
        pieces.append((max(_utc(begin - after), change), _utc(end - after)))
    return tuple(sorted(piece for piece in pieces if piece[0] < piece[1]))


def _united(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return the pieces, sorted; those that overlap as one."""
    found = list[Piece]()
    for opening, closing in sorted(pieces):
        if found and opening < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], closing)
        else:
            found.append((opening, closing))
    return tuple(found)


def instant_of(wall: datetime, zone: tzinfo) -> datetime:
    """Return the instant, in UTC, at which the clocks of `zone` show the naive datetime `wall`.

    If they show it twice, return the later one; if they skip it, the first one after the gap.
    """
    first, second = _offsets(wall, zone)
    if first >= second:
        return _utc(wall - second)
    return _change(zone, _utc(wall - second), _utc(wall - first))


def _offsets(wall: datetime, zone: tzinfo) -> tuple[timedelta, timedelta]:
    """Return the offsets of both folds: the first is larger if `wall` occurs twice, and smaller if it is skipped."""
    return _offset(wall.replace(tzinfo=zone, fold=0)), _offset(wall.replace(tzinfo=zone, fold=1))


def _offset_at(moment: datetime, zone: tzinfo) -> timedelta:
    return _offset(moment.astimezone(zone))


def _offset(local: datetime) -> timedelta:
    return local.utcoffset() or timedelta(0)


def _change(zone: tzinfo, before: datetime, after: datetime) -> datetime:
    """Return the first instant of the offset that `zone` has at `after`; at `before` it has another one."""
    before, offset = before.replace(microsecond=0), _offset_at(after, zone)
    low, high = 0, -((before - after) // _SECOND)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _offset_at(before + middle * _SECOND, zone) == offset else (middle, high)
    return before + high * _SECOND


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC)


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError(f"A calendar needs an aware datetime, but {moment} is naive: add a time zone.")
    return moment.astimezone(UTC)


def parse_zone(value: Any) -> tzinfo:
    """Return the zone with the name `value`, or `value` if it is a tzinfo. Raises TypeError or ValueError."""
    if isinstance(value, str):
        try:
            return ZoneInfo(value)
        except (KeyError, ValueError, OSError) as error:  # OSError: the name of a folder, such as "Europe"
            raise ValueError(f'{value!r} is not a time zone. Use an IANA name, such as "Europe/Berlin".') from error
    # Zones of pytz return wrong offsets when used as tzinfo, and those of dateutil cannot be hashed.
    if not isinstance(value, tzinfo) or hasattr(value, "localize") or type(value).__hash__ is None:
        raise TypeError(f'A zone is an IANA name, such as "Europe/Berlin", or a zoneinfo.ZoneInfo, not {value!r}.')
    return value


def _asked(name: str, value: Any, kind: type, method: str) -> Callable[[date], Any]:
    """Return the function of a date by which `value` is asked: its `method` if it is of `kind`, else it is a callable.

    Raises TypeError for a value of another type, or if it contains anything else than dates.
    """
    for day in value if isinstance(value, list | tuple | set | frozenset | dict) else ():
        if not isinstance(day, date) or isinstance(day, datetime):
            raise TypeError(f"{name} must contain dates, not {day!r}.")
    ask = getattr(value, method) if isinstance(value, kind) else value
    if isinstance(value, str | type) or not callable(ask):
        raise TypeError(f"{name} must be a {kind.__name__.lower()} of dates, or a callable from a date, not {value!r}.")
    return ask  # type: ignore[no-any-return]


def _parse_week(hours: Any) -> Week:
    example = 'Use for example {"mon-fri": ("09:00-12:30", "13:00-17:00")}.'
    if not isinstance(hours, Mapping):
        raise TypeError(f"hours must be a mapping of days to windows, not {hours!r}. {example}")
    week: dict[int, tuple[Window, ...]] = {}
    for days, given in hours.items():
        if not isinstance(days, str):
            raise TypeError(f"hours must map days to windows, not {days!r} to {given!r}. {example}")
        windows = _parse_windows(days, given)
        if not windows:
            raise ValueError(f"hours has no windows for {days!r}: leave out days that are closed.")
        for weekday in _parse_days(days):
            if weekday in week:
                raise ValueError(f"hours has {_DAYS[weekday]} twice: give all windows of a day at once.")
            week[weekday] = windows
    if not week:
        raise ValueError(f"hours is empty, so the calendar would never be open. {example}")
    for weekday, windows in week.items():
        later = [(begin + _MIDNIGHT, end + _MIDNIGHT) for begin, end in week.get((weekday + 1) % 7, ())[:1]]
        _refuse_overlaps(_DAYS[weekday], [*windows, *later])
    return tuple(week.get(weekday, ()) for weekday in range(7))


def _parse_windows(day: str, given: Any) -> tuple[Window, ...]:
    """Return the windows of a day, sorted. Raises TypeError or ValueError."""
    if not isinstance(given, str | Sequence):
        raise TypeError(f'{day} must have windows, such as "09:00-17:00", not {given!r}.')
    windows = sorted(map(_parse_window, [given] if isinstance(given, str) else given))
    _refuse_overlaps(day, windows)
    return tuple(windows)


def _refuse_overlaps(day: str, windows: Sequence[Window]) -> None:
    for one, other in pairwise(windows):
        if one[1] > other[0]:
            texts = f"{_window_text(one)} of {day} and {_window_text(other)}"
            raise ValueError(f"The windows {texts} overlap: an hour would count twice.")


def _parse_days(text: str) -> Iterator[int]:
    for part in text.lower().split(","):
        names = [name.strip() for name in part.split("-")]
        for name in names:
            if name not in _DAYS:
                raise ValueError(f"{name!r} in hours is not a day. {suggestion(name, _DAYS, 'Use mon to sun.')}")
        if len(names) > 2:
            raise ValueError(f'{part!r} in hours is not a range of days, such as "mon-fri".')
        first, last = _DAYS.index(names[0]), _DAYS.index(names[-1])
        yield from (weekday % 7 for weekday in range(first, last + 1 if last >= first else last + 8))


def _parse_window(text: Any) -> Window:
    if not isinstance(text, str):
        raise TypeError(f'A window is a string, such as "09:00-17:00", not {text!r}.')
    found = _WINDOW.fullmatch(text.strip())
    if found is None:
        raise ValueError(f'{text!r} is not a window. Use "HH:MM-HH:MM", such as "09:00-17:00" or "00:00-24:00".')
    begin = int(found[1]) * 60 + int(found[2])
    end = int(found[3]) * 60 + int(found[4]) if found[3] else _MIDNIGHT
    if begin == end:
        raise ValueError(f'The window {text!r} is empty. For a whole day, use "00:00-24:00".')
    return begin, end if end > begin else end + _MIDNIGHT


def _window_text(window: Window) -> str:
    begin, end = (minutes if minutes == _MIDNIGHT else minutes % _MIDNIGHT for minutes in window)
    return f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
