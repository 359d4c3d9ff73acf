"""Open time counted minute by minute: an oracle for calendars that shares no code with them, and cases for both.

Each minute of UTC is asked for its local wall time, and whether that is within a window. This is exact, because zones
change their clocks, and windows begin and end, at whole minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

from django_delayq.times.calendars import WorkingHours

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
REACH = 10 * DAY
"""How far the oracle counts to both sides of the middle of a case."""

# Around which datetimes cases are: changes of the clocks, and what else is special about a date.
MIDDLES = [
    ("Europe/Berlin", datetime(2026, 3, 29, 1, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 3, 8, 7, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 11, 1, 6, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),  # by half an hour
    ("Australia/Lord_Howe", datetime(2026, 10, 3, 15, 30, tzinfo=UTC)),
    ("Pacific/Apia", datetime(2011, 12, 30, 10, tzinfo=UTC)),  # 30 December did not exist
    ("Pacific/Apia", datetime(2012, 3, 31, 14, tzinfo=UTC)),
    ("America/Sao_Paulo", datetime(2018, 11, 4, 3, tzinfo=UTC)),  # midnight did not exist
    ("America/Sao_Paulo", datetime(2018, 2, 18, 2, tzinfo=UTC)),  # from midnight to the day before
    ("Asia/Tehran", datetime(2022, 3, 21, 20, 30, tzinfo=UTC)),
    ("Asia/Tehran", datetime(2022, 9, 21, 19, 30, tzinfo=UTC)),
    ("America/Havana", datetime(2026, 11, 1, 5, tzinfo=UTC)),  # to midnight of the same day
    ("America/St_Johns", datetime(2010, 11, 7, 2, 31, tzinfo=UTC)),  # from a minute after midnight to the day before
    ("Asia/Kathmandu", datetime(2028, 2, 29, 12, tzinfo=UTC)),  # a leap day, 5:45 ahead of UTC
]
CHANGES = (0, 1, 30, 60, 90, 120, 150, 180, 240, 1380, 1381, 1410, 1440)
"""Minutes of the day at which clocks change, and between the two times that they show one."""


def window_text(begin: int, end: int) -> str:
    return f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"


@cache
def local_minutes(zone: str, middle: datetime) -> list[tuple[date, int]]:
    """Return the local date and minute of the day of each minute of UTC around `middle`."""
    minutes, info = [], ZoneInfo(zone)
    for number in range(int(2 * REACH / MINUTE)):
        local = (middle - REACH + number * MINUTE).astimezone(info)
        minutes.append((local.date(), local.hour * 60 + local.minute))
    return minutes


@dataclass(frozen=True)
class Case:
    """A calendar and a datetime near the middle, at which the clocks may change."""

    zone: str
    middle: datetime
    week: tuple[tuple[tuple[int, int], ...], ...]  # windows of each weekday; one that crosses midnight ends before it
    holidays: frozenset[date]
    special: Mapping[date, tuple[tuple[int, int], ...]]
    is_callable: bool
    start: datetime

    @property
    def calendar(self) -> WorkingHours:
        hours = {
            day: [window_text(*w) for w in windows] for day, windows in zip(DAYS, self.week, strict=True) if windows
        }
        special = {day: [window_text(*w) for w in windows] or None for day, windows in self.special.items()}
        if self.is_callable:
            return WorkingHours(self.zone, hours, self.holidays.__contains__, special.__getitem__)
        return WorkingHours(self.zone, hours, self.holidays, special)

    def begins_on(self, day: date) -> tuple[tuple[int, int], ...]:
        return self.special.get(day, () if day in self.holidays else self.week[day.weekday()])

    def open_minutes(self) -> list[bool]:
        """Return which minutes are open, from `middle - REACH` on."""
        minutes = local_minutes(self.zone, self.middle)
        marks: dict[date, list[bool]] = {}
        for day in {day for day, _ in minutes}:
            marks[day] = [False] * 1440
            for begin, end in self.begins_on(day):
                for minute in range(begin, end if end > begin else 1440):
                    marks[day][minute] = True
            for begin, end in self.begins_on(day - DAY):
                if end <= begin:
                    for minute in range(end):
                        marks[day][minute] = True
        return [marks[day][minute] for day, minute in minutes]


class Count:
    """The open time of a case, by counting."""

    def __init__(self, case: Case) -> None:
        self.first = case.middle - REACH
        self.is_open = case.open_minutes()

    def _position(self, moment: datetime) -> tuple[int, float]:
        number, rest = divmod(moment - self.first, MINUTE)
        return number, rest.total_seconds()

    def between(self, a: datetime, b: datetime) -> float:
        if b < a:
            return -self.between(b, a)
        (first, skipped), (last, part) = self._position(a), self._position(b)
        total = 60.0 * sum(self.is_open[first:last])
        return total - skipped * self.is_open[first] + part * self.is_open[last]

    def add(self, start: datetime, seconds: float) -> datetime | None:
        """Return the answer by counting; None if it is out of reach."""
        number, passed = self._position(start)
        if seconds < 0:
            return self._back(number, passed, -seconds)
        while number < len(self.is_open):
            if self.is_open[number]:
                if seconds <= 60 - passed and (seconds or passed < 60):
                    return self.first + number * MINUTE + timedelta(seconds=passed + seconds)
                seconds -= 60 - passed
            number, passed = number + 1, 0.0
        return None

    def _back(self, number: int, passed: float, seconds: float) -> datetime | None:
        while number >= 0:
            if self.is_open[number] and passed:
                if seconds <= passed:
                    return self.first + number * MINUTE + timedelta(seconds=passed - seconds)
                seconds -= passed
            number, passed = number - 1, 60.0
        return None


@st.composite
def windows(draw: st.DrawFn, dawn: int) -> tuple[tuple[int, int], ...]:
    """Draw windows of a day that begin after `dawn`, with pauses, or none between two that touch."""
    minutes = st.one_of(st.integers(dawn // 5, 288).map(lambda fives: 5 * fives), st.sampled_from(CHANGES))
    cuts = draw(st.lists(minutes.filter(lambda minute: minute >= dawn), min_size=2, max_size=4))
    cuts = sorted(set(cuts))
    found = tuple((begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=False))
    if len(cuts) == 3 and draw(st.booleans()):
        found += ((cuts[1], cuts[2]),)
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    zone, middle = draw(st.sampled_from(MIDDLES))
    dawn = draw(st.sampled_from((0, 0, 30, 60, 90, 130, 180, 400)))
    days = [draw(windows(dawn)), draw(windows(dawn))]
    if dawn and draw(st.booleans()):  # a shift over midnight
        dusk = draw(st.integers(max([0, *(end for day in days for _, end in day)]), 1440))
        if dawn < dusk < 1440:
            days[1] += ((dusk, dawn),)
    if not any(days):
        days[0] = ((540, 1020),)
    days.append(())
    pattern = draw(st.lists(st.sampled_from((0, 0, 1, 1, 2)), min_size=7, max_size=7))
    week = tuple(days[kind] for kind in pattern)
    if not any(week):
        week = tuple(days[0] or days[1] for _ in pattern)
    offsets = draw(st.sets(st.integers(-4, 4), max_size=3))
    holidays = frozenset(middle.date() + offset * DAY for offset in offsets)
    alone = st.one_of(windows(0), st.just(()), st.sampled_from([((1320, 360),), ((600, 1080), (1200, 540))]))
    special = {middle.date() + DAY * at: draw(alone) for at in draw(st.sets(st.integers(-3, 3), max_size=3))}
    seconds = draw(st.one_of(st.integers(-300, 300).map(lambda fives: 300 * fives), st.integers(-200_000, 200_000)))
    return Case(zone, middle, week, holidays, special, draw(st.booleans()), middle + timedelta(seconds=seconds))


def around(case: Case) -> Iterator[date]:
    """Yield the dates within reach, the first one first."""
    first = (case.middle - REACH).date() + DAY
    yield from (first + number * DAY for number in range(2 * REACH.days - 2))
