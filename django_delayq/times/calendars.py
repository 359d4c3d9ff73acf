"""Working calendars: when somewhere is open, and which days are working days. Imports no Django.

`Calendar` is what spans need from a calendar, also from one of another package. `WorkingHours` is the built-in one:
windows of local wall time for each day of the week, and holidays.

All results are aware datetimes in UTC. An instant is open if its local wall time is within a window of its day, or
within a window of the day before that crosses midnight. So a window can be open twice, or not at all, on a day on which
the clocks change. The windows of a date are computed once; whether it is a holiday is asked each time, because holidays
are data that may change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class WorkingHours:
    """A calendar of weekly opening hours in one time zone, without holidays.

    Two are equal if zone and hours are, and if their holidays are the same object.

    Args:
        zone: an IANA name, such as "Europe/Berlin", or a tzinfo.
        hours: days to windows: {"mon-fri": ("09:00-12:30", "13:00-17:00"), "sat": "10:00-14:00"}. Days are "mon",
            "mon,wed", "mon-fri", or "fri-mon" across the weekend. "22:00-06:00" crosses midnight and belongs to the
            day on which it begins, also concerning holidays. "00:00-24:00" is a whole day.
        holidays: dates on which no window begins: a container of dates, such as `holidays.Germany()` of the package
            `holidays`, or a callable from a date to a bool. It is asked each time.

    Raises:
        TypeError, ValueError: an argument of another type; an unknown zone or day; a day that is named twice; windows
            that are empty or overlap.
    """

    zone: tzinfo
    week: Week
    holidays: Container[date] | Callable[[date], bool]
    _is_holiday: Callable[[date], bool]

    def __init__(
        self,
        zone: str | tzinfo,
        hours: Mapping[str, str | Sequence[str]],
        holidays: Container[date] | Callable[[date], bool] = (),
    ) -> None:
        object.__setattr__(self, "zone", parse_zone(zone))
        object.__setattr__(self, "week", _parse_week(hours))
        object.__setattr__(self, "holidays", holidays)
        object.__setattr__(self, "_is_holiday", _parse_holidays(holidays))

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

        A working day is one on which a window begins and which is not a holiday.

        Raises:
            InvalidDelay: there is no working day for a year.
        """
        if n == 0:
            return day if self._is_working(day) else self.nth_day(day, 1)
        step = _DAY if n > 0 else -_DAY
        for _ in range(abs(n)):
            for _ in range(MAX_CLOSED_DAYS):
                day += step
                if self._is_working(day):
                    break
            else:
                raise self._never_open(day)
        return day

    def _is_working(self, day: date) -> bool:
        return bool(self.week[day.weekday()]) and not self._is_holiday(day)

    def _pieces(self, start: datetime, step: int, days: int | None = None) -> Iterator[Piece]:
        """Yield the pieces around and after `start` in order; with step -1: before it, the latest first.

        Those of windows that begin on one of so many `days`, the first one being the day before that of `start`. By
        default, search: as long as any end is supported, and until the calendar is closed for a year.
        """
        day, stride = start.astimezone(self.zone).date() - step * _DAY, step * _DAY
        held: tuple[Piece, ...] = ()  # until it is certain that none of the next day is before them
        closed = 0
        for _ in range(MAX_SEARCHED_DAYS if days is None else days):
            windows = self.week[day.weekday()]
            found = _pieces_of(self.zone, windows, day) if windows and not self._is_holiday(day) else ()
            if held and found and held[0][0] < found[-1][1] and found[0][0] < held[-1][1]:
                held = tuple(sorted(held + found))  # the clocks went back after midnight, into the windows of a day
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
            f"The calendar {self} is closed for {MAX_CLOSED_DAYS} days up to {day}: check its holidays."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkingHours):
            return NotImplemented
        return (self.zone, self.week) == (other.zone, other.week) and self.holidays is other.holidays

    def __hash__(self) -> int:
        return hash((self.zone, self.week))

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


def _parse_holidays(value: Any) -> Callable[[date], bool]:
    if isinstance(value, list | tuple | set | frozenset):
        for day in value:
            if not isinstance(day, date) or isinstance(day, datetime):
                raise TypeError(f"holidays must contain dates, not {day!r}.")
    if hasattr(value, "__contains__") and not isinstance(value, str | type):
        return value.__contains__  # type: ignore[no-any-return]
    if callable(value) and not isinstance(value, type):
        return value  # type: ignore[no-any-return]
    raise TypeError(f"holidays must be a container of dates, or a callable from a date to a bool, not {value!r}.")


def _parse_week(hours: Any) -> Week:
    example = 'Use for example {"mon-fri": ("09:00-12:30", "13:00-17:00")}.'
    if not isinstance(hours, Mapping):
        raise TypeError(f"hours must be a mapping of days to windows, not {hours!r}. {example}")
    week: dict[int, tuple[Window, ...]] = {}
    for days, given in hours.items():
        if not isinstance(days, str) or not isinstance(given, str | Sequence):
            raise TypeError(f"hours must map days to windows, not {days!r} to {given!r}. {example}")
        windows = tuple(sorted(map(_parse_window, [given] if isinstance(given, str) else given)))
        if not windows:
            raise ValueError(f"hours has no windows for {days!r}: leave out days that are closed.")
        for weekday in _parse_days(days):
            if weekday in week:
                raise ValueError(f"hours has {_DAYS[weekday]} twice: give all windows of a day at once.")
            week[weekday] = windows
    if not week:
        raise ValueError(f"hours is empty, so the calendar would never be open. {example}")
    return _without_overlaps(tuple(week.get(weekday, ()) for weekday in range(7)))


def _without_overlaps(week: Week) -> Week:
    for weekday, windows in enumerate(week):
        following = week[(weekday + 1) % 7][:1]
        later = [(begin + _MIDNIGHT, end + _MIDNIGHT) for begin, end in following]
        for one, other in pairwise([*windows, *later]):
            if one[1] > other[0]:
                raise ValueError(
                    f"The windows {_window_text(one)} of {_DAYS[weekday]} and {_window_text(other)} overlap: "
                    "an hour would count twice."
                )
    return week


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
