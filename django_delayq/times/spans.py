"""Spans: what a deadline is counted in, if not in seconds. `Working` hours or days of a calendar, and `Wall` time.

A span is an object with `end(since, obj)`. Wherever a delay is accepted, a `timedelta` or a span is, and a
`relativedelta` of dateutil. The functions of `lengths` answer all questions about any of them, so that no other module
distinguishes kinds of spans.

The library's datetimes are aware in UTC, or naive in TIME_ZONE without `USE_TZ`. Calendars work with aware ones only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from django.conf import settings
from django.utils import timezone

from django_delayq.exceptions import InvalidDelay
from django_delayq.times import clock
from django_delayq.times.calendars import Calendar, instant_of, is_calendar, parse_zone
from django_delayq.times.paths import Source, found_at, value_at

_UNITS = ("years", "months", "weeks", "days", "hours", "minutes")
_DAY, _HOUR, _MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
SAMPLE = datetime(2000, 1, 31)  # noqa: DTZ001 - wall time, to try out spans: a day that few months have
L = TypeVar("L")


class Span(Protocol):
    """A way to count from a datetime to a deadline. It may depend on the object.

    A span that counts the open time of a calendar also has `calendar_of(obj) -> Calendar | None`: a stopped clock then
    keeps open time. `str()` of a span is displayed.
    """

    def end(self, since: datetime | date, obj: Any) -> datetime | None:
        """Return the deadline as `USE_TZ` has datetimes: aware, or naive local time; None: `obj` is exempt."""


Length: TypeAlias = timedelta | Span


class BuiltIn:
    """What the functions below ask the built-in spans."""

    __slots__ = ()

    @property
    def source(self) -> Source | None:
        """Where an object has the calendar or zone of the span; None if it is the same for all objects."""
        return None

    @property
    def amounts(self) -> dict[str, str]:
        """The paths at which an object has amounts of the span, by unit."""
        return {unit: value for unit in _UNITS if isinstance(value := getattr(self, unit, None), str)}

    @property
    def has_wall_time(self) -> bool:
        return getattr(self, "at", None) is not None

    @property
    def is_negative(self) -> bool:
        return not self.amounts and self._moved(SAMPLE) < SAMPLE

    def _moved(self, wall: datetime) -> datetime:
        raise NotImplementedError

    def resized(self, to: timedelta) -> Length:
        return to


@dataclass(frozen=True, kw_only=True, slots=True)
class Working(BuiltIn):
    """Open time of a calendar: `Working(hours=4, calendar=office)` or `Working(days=3, at="09:00", calendar=office)`.

    Hours count open time in real seconds. Days lead to the n-th working day after that of `since`. They do not mix,
    because a "day" of 24 open hours is three working days.

    Args:
        hours, minutes: numbers, added up. From a date, they count from its first opening.
        days: an int. 0: the day of `since`, or the next working day. Instead of a number, each unit takes a path to
            a field that has it, such as "team__sla_hours". If that is NULL, the object is exempt.
        at: the local time of that day, as "HH:MM" or a `time`. Without it, `days` keep the local time of `since`.
        calendar: a `Calendar`; a path of attributes such as "team__calendar"; or a callable that gets the object. If
            that is None, the object is exempt.

    Raises:
        TypeError, ValueError: a value of another type or range, or hours together with days. `end` raises
            `InvalidDelay` if the calendar is closed for a year.
    """

    hours: float | str | None = None
    minutes: float | str | None = None
    days: int | str | None = None
    at: time | str | None = None
    calendar: Calendar | Source

    def __post_init__(self) -> None:
        if (self.days is None) == (self.hours is None and self.minutes is None):
            raise TypeError("Working() takes hours and minutes, or days, not both: 24 open hours are three days.")
        if self.at is not None and self.days is None:
            raise TypeError('Working() takes at="..." only together with days: hours end at a time of their own.')
        _check_numbers(self, {"hours": _HOUR, "minutes": _MINUTE}, float)
        _check_numbers(self, {"days": _DAY}, int)
        object.__setattr__(self, "at", _parse_time(self.at))
        if not is_calendar(self.calendar):
            _check_source(self.calendar, "calendar", "a Calendar, such as WorkingHours(...)")

    def end(self, since: datetime | date, obj: Any) -> datetime | None:
        """Return the deadline that begins at `since`; None if `obj` has no calendar. Raises InvalidDelay."""
        calendar, span = self.calendar_of(obj), resolved(self, obj)
        if calendar is None or span is None:
            return None
        if span.days is None:
            # A date begins at its first midnight, if it has two.
            start = since if isinstance(since, datetime) else datetime.combine(since, time(), _zone_of(calendar))
            return fitting_end(calendar.add(in_utc(start), span._open_time.total_seconds()))
        zone = _zone_of(calendar)
        wall = _wall(since, zone, self.at, self)
        return fitting_end(
            instant_of(datetime.combine(calendar.nth_day(wall.date(), cast("int", span.days)), wall.time()), zone)
        )

    def calendar_of(self, obj: Any) -> Calendar | None:
        """Return the calendar for `obj`; None if it has none. Raises InvalidDelay for an object of another kind."""
        found: Any = self.calendar
        if not is_calendar(found):
            found = found_at(found, obj)
        if found is not None and not is_calendar(found):
            raise InvalidDelay(f"The calendar of '{self}' is {found!r}, which lacks the methods of a Calendar.")
        return found

    def resized(self, to: timedelta) -> Length:
        if self.days is not None:
            return replace(self, days=_whole_days(to, self))
        if to % _HOUR:
            return replace(self, hours=None, minutes=to / _MINUTE if to % _MINUTE else to // _MINUTE)
        return replace(self, hours=to // _HOUR, minutes=None)

    @property
    def _open_time(self) -> timedelta:
        return timedelta(hours=self.hours or 0, minutes=self.minutes or 0)  # type: ignore[arg-type] # of `resolved`

    @property
    def source(self) -> Source | None:
        return None if is_calendar(self.calendar) else self.calendar  # type: ignore[return-value]

    @property
    def is_negative(self) -> bool:
        return not self.amounts and ((self.days or 0) < 0 or self._open_time < timedelta(0))  # type: ignore[operator]

    def __str__(self) -> str:
        minutes = (self.minutes, "working minute" if self.hours is None else "minute")
        units = ((self.days, "working day"), (self.hours, "working hour"), minutes)
        length = _units_text(units) or f"0 working {'hours' if self.days is None else 'days'}"
        at = f"{',' if self.is_negative else ''} {_time_text(self.at)}" if self.at is not None else ""
        where = _source_text(self.source) if self.source is not None else str(_zone_of(self.calendar))
        return f"{length}{at}, {where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wall(BuiltIn):
    """Calendar arithmetic in local wall time: `Wall(months=-1, at="08:00", zone="tenant__zone")`.

    It counts from `since` each time, and a month that is too short ends it: a month after 31 January is 28 February,
    two months after it are 31 March. An ambiguous local time is the later one, a missing one the first after it.

    Args:
        years, months, weeks, days: ints, added up, or paths to fields that have them: if one is NULL, the object is
            exempt. Years and months need the package python-dateutil.
        at: the local time of the resulting day, as "HH:MM" or a `time`. Without it, that of `since`. Needed if
            `since` is a date.
        zone: an IANA name; a tzinfo; a path of attributes such as "tenant__zone"; a callable that gets the object; or
            None for the setting TIME_ZONE. If a path or callable leads to None or "", the object is exempt.

    Raises:
        TypeError, ValueError: a value of another type or range, or no value at all.
        ImportError: python-dateutil is missing.
    """

    years: int | str = 0
    months: int | str = 0
    weeks: int | str = 0
    days: int | str = 0
    at: time | str | None = None
    zone: tzinfo | Source | None = None

    def __post_init__(self) -> None:
        units = {"years": 366 * _DAY, "months": 31 * _DAY, "weeks": 7 * _DAY, "days": _DAY}
        _check_numbers(self, units, int)
        object.__setattr__(self, "at", _parse_time(self.at))
        if self.at is None and not any(getattr(self, name) for name in units):
            raise ValueError('Wall() needs years, months, weeks, days or at, such as Wall(days=1, at="08:00").')
        if self.zone is not None:
            try:
                object.__setattr__(self, "zone", parse_zone(self.zone))
            except (TypeError, ValueError):
                _check_source(self.zone, "zone", "an IANA name, a zoneinfo.ZoneInfo")
        if self.years or self.months:  # raises ImportError now, and not for the first object
            _relativedelta(*(0 if isinstance(value, str) else value for value in (self.years, self.months)), 0, 0)

    def end(self, since: datetime | date, obj: Any) -> datetime | None:
        """Return the deadline that begins at `since`; None if `obj` lacks zone or amount. Raises InvalidDelay."""
        zone, span = self._zone(obj), resolved(self, obj)
        if zone is None or span is None:
            return None
        return fitting_end(instant_of(span._moved(_wall(since, zone, self.at, self)), zone))

    def _zone(self, obj: Any) -> tzinfo | None:
        if self.zone is None:
            return timezone.get_default_timezone()
        found = self.zone if isinstance(self.zone, tzinfo) else found_at(self.zone, obj)
        try:
            return parse_zone(found) if found is not None and found != "" else None
        except (TypeError, ValueError) as error:
            raise InvalidDelay(f"The zone of '{self}' is wrong: {error}") from error

    def _moved(self, wall: datetime) -> datetime:
        years, months, weeks, days = cast("tuple[int, ...]", (self.years, self.months, self.weeks, self.days))
        if years or months:
            return _plus(wall, _relativedelta(years, months, weeks, days))
        return wall + timedelta(weeks=weeks, days=days)

    def resized(self, to: timedelta) -> Length:
        return to if self.at is None else Wall(days=_whole_days(to, self), at=self.at, zone=self.zone)

    @property
    def source(self) -> Source | None:
        return None if isinstance(self.zone, tzinfo) else self.zone

    def __str__(self) -> str:
        units = _units_text([(getattr(self, f"{unit}s"), unit) for unit in ("year", "month", "week", "day")])
        zone = _source_text(self.source) if self.source is not None else str(self.zone or "")
        return ", ".join(filter(None, (units, _time_text(self.at), zone)))


@dataclass(frozen=True, slots=True)
class Relative(BuiltIn):
    """A `relativedelta`, added to the wall time of TIME_ZONE by the rules of `Wall`."""

    value: Any

    def end(self, since: datetime | date, obj: Any) -> datetime:
        zone = timezone.get_default_timezone()
        at = time() if self.has_wall_time and not isinstance(since, datetime) else None
        return fitting_end(instant_of(self._moved(_wall(since, zone, at, self)), zone))

    def _moved(self, wall: datetime) -> datetime:
        return _plus(wall, self.value)

    @property
    def has_wall_time(self) -> bool:
        return self.value.hour is not None

    def __str__(self) -> str:
        units = ("year", "month", "day", "hour", "minute", "second", "microsecond")
        fixed = [f"{unit}={getattr(self.value, unit)}" for unit in (*units, "weekday")]
        relative = _units_text([(getattr(self.value, f"{unit}s"), unit) for unit in units])
        return ", ".join(filter(None, [relative, *(part for part in fixed if not part.endswith("=None"))])) or "0 days"


def resolved(length: L, obj: Any) -> L | None:
    """Return `length` with the amounts that `obj` has at the paths that it names; None: one is missing (exempt).

    Raises InvalidDelay for an amount of another type or range.
    """
    paths = length.amounts if isinstance(length, BuiltIn) else {}
    found = {unit: value_at(obj, path) for unit, path in paths.items()}
    if None in found.values():
        return None
    for unit, value in found.items():
        if isinstance(value, Decimal | float) and not isinstance(value, bool):
            found[unit] = int(value) if value == int(value) else float(value)
        elif isinstance(value, str):  # would be a path
            raise InvalidDelay(f"{paths[unit]} of '{length}' is {value!r}, not a number.")
    try:
        return replace(length, **found) if found else length  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise InvalidDelay(f"An amount of '{length}' is wrong: {error}") from error


def in_utc(moment: datetime) -> datetime:
    """Return `moment` aware and in UTC, as calendars take it."""
    return clock.aware(moment).astimezone(UTC)


def fitting_end(moment: datetime) -> datetime:
    """Return what a calendar has returned as the library has datetimes: without `USE_TZ` naive, in TIME_ZONE."""
    return moment if settings.USE_TZ else clock.fitting(moment)


def _zone_of(calendar: Any) -> tzinfo:
    return parse_zone(getattr(calendar, "zone", None) or timezone.get_default_timezone())


def _wall(since: datetime | date, zone: tzinfo, at: Any, span: object) -> datetime:
    """Return `since` as naive wall time of `zone`, at the local time `at` if that is not None."""
    if isinstance(since, datetime):
        wall = clock.aware(since).astimezone(zone).replace(tzinfo=None)
        return wall if at is None else datetime.combine(wall, at)
    if at is None:
        raise InvalidDelay(f"'{span}' counts from a datetime, but {since} is a date: add at=\"HH:MM\".")
    return datetime.combine(since, at)


def _plus(wall: datetime, delta: Any) -> datetime:
    try:
        return wall + delta  # type: ignore[no-any-return]
    except ValueError as error:  # what dateutil raises for a year beyond those of Python
        raise OverflowError(str(error)) from error


@lru_cache(maxsize=256)
def _relativedelta(years: int, months: int, weeks: int, days: int) -> Any:
    try:
        from dateutil.relativedelta import relativedelta
    except ImportError as error:
        raise ImportError("Wall(months=) needs python-dateutil: pip install django-delayq[calendars]") from error
    return relativedelta(years=years, months=months, weeks=weeks, days=days)


def _check_source(value: object, name: str, otherwise: str) -> None:
    if isinstance(value, str):
        if not all(step.isidentifier() for step in value.split("__")):
            raise ValueError(f'{name}={value!r} is neither {otherwise} nor a path such as "team__{name}".')
    elif not callable(value) or isinstance(value, type):
        raise TypeError(f"{name} must be {otherwise}, a path, or a callable that gets the object, not {value!r}.")


def _check_numbers(span: object, units: Mapping[str, timedelta], kind: type[float]) -> None:
    for name, unit in units.items():
        value = getattr(span, name)
        if value is None:
            continue
        if isinstance(value, str):
            _check_source(value, name, "a number")
            continue
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise TypeError(f"{name} must be {'an int' if kind is int else 'a number'}, not {value!r}.")
        if not abs(value) <= clock.LONGEST / unit:  # nor is NaN
            raise ValueError(f"{name}={value!r} leads beyond the supported years.")


def _parse_time(value: Any) -> time | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.strptime(value, "%H:%M").time()  # noqa: DTZ007 - local wall time
        except ValueError as error:
            raise ValueError(f'at={value!r} is not a time of day, such as "08:00".') from error
    if not isinstance(value, time) or value.tzinfo is not None:
        raise TypeError(f'at must be "HH:MM" or a datetime.time without a zone, not {value!r}.')
    return value


def _time_text(at: Any) -> str:
    return "" if at is None else f"at {at.isoformat('auto' if at.second or at.microsecond else 'minutes')}"


def _whole_days(to: timedelta, span: object) -> int:
    if to % _DAY:
        raise InvalidDelay(f"'{span}' counts days: {clock.duration_text(to)} must be a number of whole days.")
    return to // _DAY


def _units_text(units: Iterable[tuple[float | str | None, str]]) -> str:
    """Return `1 month 3 days`, or `1 month before` if all are negative; without the units that are 0."""
    counts = [(number, unit) for number, unit in units if number]
    is_before = bool(counts) and all(not isinstance(number, str) and number < 0 for number, _ in counts)
    texts = []
    for number, unit in counts:
        shown = number if isinstance(number, str) else f"{abs(number) if is_before else number:.10g}"
        texts.append(clock.plural(shown, unit))
    return " ".join(texts) + (" before" if is_before else "")


def _source_text(source: Source) -> str:
    return source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
