"""Lengths: a timedelta or a span, and all questions about either: where it ends, what it reads, how it is displayed."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable
from datetime import MAXYEAR, UTC, date, datetime, timedelta
from typing import Any, NamedTuple, TypedDict

from django.conf import settings
from django.utils import formats, timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_delayq.exceptions import InvalidDelay
from django_delayq.times import clock
from django_delayq.times.calendars import Calendar
from django_delayq.times.clock import check_moment, shifted
from django_delayq.times.paths import relations_on
from django_delayq.times.spans import SAMPLE, BuiltIn, Length, Relative, Working, fitting_end, in_utc

UNIT_LABELS = {
    "d": gettext_lazy("{n} d"),
    "h": gettext_lazy("{n} h"),
    "min": gettext_lazy("{n} min"),
    "s": gettext_lazy("{n} s"),
}
_SPAN_UNITS = {
    "working minute": ngettext_lazy("{n} working minute", "{n} working minutes"),
    "working hour": ngettext_lazy("{n} working hour", "{n} working hours"),
    "working day": ngettext_lazy("{n} working day", "{n} working days"),
    "minute": ngettext_lazy("{n} minute", "{n} minutes"),
    "day": ngettext_lazy("{n} day", "{n} days"),
    "week": ngettext_lazy("{n} week", "{n} weeks"),
    "month": ngettext_lazy("{n} month", "{n} months"),
    "year": ngettext_lazy("{n} year", "{n} years"),
}
_IN_SPANS = re.compile(rf"(\S+) ({'|'.join(_SPAN_UNITS)})s?\b|\bat (\d\d:\S*\d)|(?<= )(before)\b")
_LENGTH_TEXT = re.compile(r"(.*?)((?:,? ?\bat |, ).*)?", re.DOTALL)


def as_length(value: Any, name: str) -> Length:
    """Return `value` if it is a timedelta or a span, and a relativedelta as a span. Otherwise raise InvalidDelay."""
    length = as_span(value)
    if isinstance(length, timedelta) or is_span(length):
        return length  # type: ignore[no-any-return]
    raise InvalidDelay(f"{name} must be a timedelta, a span such as Working(...) or a relativedelta, not {value!r}.")


def is_span(value: Any) -> bool:
    """Return whether `value` is a span. A class is none, nor a timedelta."""
    return callable(getattr(value, "end", None)) and not isinstance(value, type)


def as_span(value: Any) -> Any:
    """Return a relativedelta as a span, and any other value as it is.

    dateutil is not imported: without it there is no relativedelta. Raises InvalidDelay if one leads to no datetime
    (`hour=25`).
    """
    dateutil = sys.modules.get("dateutil.relativedelta")
    if dateutil is None or not isinstance(value, dateutil.relativedelta):
        return value
    try:
        SAMPLE + value
    except (ValueError, OverflowError) as error:
        raise InvalidDelay(f"{value} leads to no datetime: {error}.") from error
    return Relative(value)


def end_of(length: Length, since: datetime | date, obj: Any) -> datetime | None:
    """Return the end of `length` from `since`, in UTC if aware.

    None if `obj` is exempt, or if the end is not `clock.within_calendar`.

    Raises:
        InvalidDelay: the calendar is closed for a year; a date as `since` without a local time; or a span that returns
            something else than a datetime that fits `USE_TZ`.
    """
    if isinstance(length, timedelta):
        return clock.within_calendar(since, length)  # type: ignore[arg-type] # declarations refuse a date here
    try:
        found = length.end(since, obj)
    except OverflowError:
        return None
    if found is None:
        return None
    if not isinstance(found, datetime) or timezone.is_aware(found) != settings.USE_TZ:
        clock.check_awareness(found, f"The end of '{length_text(length)}'")
    return clock.within_calendar(found)


class OwnTime(NamedTuple):
    """The time in which the deadline of one object counts: open hours of the calendar of a span, else real time."""

    length: Length | None
    """None: real time."""
    obj: Any = None
    has_grace: bool = False
    """The handler acts later than at the deadline, so that a deadline which has passed still counts."""

    def elapsed(self, start: datetime, end: datetime) -> timedelta:
        """Return how much of it lies between two datetimes; negative if `end` is earlier."""
        calendar = self.calendar()
        if calendar is None:
            return in_utc(end) - in_utc(start)
        return timedelta(seconds=calendar.between(in_utc(start), in_utc(end)))

    def forward(self, start: datetime, by: timedelta) -> datetime:
        """Return when it has counted `by` since `start`: the inverse of `elapsed`. `start` if `by` is not positive.

        Without a length it is at the latest the last supported datetime.

        Raises:
            InvalidDelay: that is beyond the supported years, or the calendar is closed for a year.
        """
        if by <= timedelta(0):
            return start
        if self.length is None:
            return clock.within_calendar(start, by) or clock.latest_start(timedelta.resolution)
        found, calendar = clock.shifted(start, by), self.calendar()
        if calendar is None:
            return found
        try:
            found = calendar.add(in_utc(start), by.total_seconds())
        except OverflowError:
            found = datetime(MAXYEAR, 1, 1, tzinfo=UTC)
        return clock.shifted(fitting_end(found), timedelta(0))

    def after_stop(self, due_at: datetime, stopped_at: datetime, resumed_at: datetime) -> datetime:
        """Return what becomes of the deadline `due_at` if its clock is stopped between two datetimes.

        It moves by how much of this time that was, counted from the deadline itself. So a night or a weekend does not
        move working hours, and no deadline becomes earlier. One that has passed is due when the clock runs again, but
        with a grace, it stays as long ago as it was. Raises InvalidDelay: see `forward`.
        """
        moved = self.forward(due_at, self.elapsed(stopped_at, resumed_at))
        return moved if moved == due_at or (self.has_grace and due_at < stopped_at) else max(moved, resumed_at)

    def after_stops(self, due_at: datetime, stops: Iterable[tuple[datetime, datetime]]) -> datetime:
        """Return what becomes of `due_at` by several stops, the oldest first: see `after_stop`."""
        return functools.reduce(lambda found, stop: self.after_stop(found, *stop), stops, due_at)

    def calendar(self) -> Calendar | None:
        """Return the calendar whose open hours it is; None: it is real time."""
        calendar_of = getattr(self.length, "calendar_of", None)
        return None if calendar_of is None else calendar_of(self.obj)


def steady(length: Length, start: datetime, obj: Any) -> timedelta | None:
    """Return how much own time each `length` from `start` on has, one after the other; None: it differs.

    It is the same for a timedelta, and for open hours.
    """
    is_steady = isinstance(length, timedelta) or (isinstance(length, Working) and length.days is None)
    end = end_of(length, start, obj) if is_steady else None
    return None if end is None else OwnTime(length, obj).elapsed(start, end)


def resized(length: Length, to: timedelta, *, strict: bool = False) -> Length:
    """Return the delay `to` for a policy that declares `length`: in its calendar and zone, if it has one.

    If `length` counts days, and `to` is not a number of whole days: `to` as real time, so that no save fails after the
    declaration was changed. With `strict`, that raises InvalidDelay.
    """
    try:
        return length.resized(to) if isinstance(length, BuiltIn) else to
    except InvalidDelay:
        if strict:
            raise
        return to


def needs_object(length: Length) -> bool:
    """Return whether the end may depend on the object: by a path or a callable, or as the span is not built in."""
    return bool(paths_of(length)) or reads_unnamed(length)


def paths_of(length: Length) -> tuple[str, ...]:
    """Return the paths that `length` reads from an object, such as "team__sla_hours", "team__calendar"."""
    if not isinstance(length, BuiltIn):
        return ()
    return (*length.amounts.values(), *((length.source,) if isinstance(length.source, str) else ()))


def amount_paths_of(length: Length) -> tuple[str, ...]:
    """Return those of the paths of `length` that lead to numbers."""
    return tuple(length.amounts.values()) if isinstance(length, BuiltIn) else ()


def reads_unnamed(length: Length) -> bool:
    """Return whether the end may depend on values of the object that no path names: of a callable or a foreign span."""
    return callable(length.source) if isinstance(length, BuiltIn) else not isinstance(length, timedelta)


def relations_of(length: Length) -> tuple[str, ...]:
    """Return the relations on the paths of `length`, for `select_related`: the paths without their last step."""
    return tuple(relation for path in paths_of(length) for relation in relations_on(path))


def has_wall_time(length: Length) -> bool:
    """Return whether `length` may count from a date: it sets the local time, or is a span that is not built in."""
    return length.has_wall_time if isinstance(length, BuiltIn) else not isinstance(length, timedelta)


def is_negative(length: Length) -> bool:
    """Return whether the end is before the beginning; False for a span that is not built in."""
    if isinstance(length, timedelta):
        return length < timedelta(0)
    return isinstance(length, BuiltIn) and length.is_negative


def length_text(length: Length) -> str:
    """Return `30 min`, `4 working hours, Europe/Berlin` or `1 month before, at 08:00, tenant__zone`."""
    return clock.duration_text(length) if isinstance(length, timedelta) else str(length)


def duration_label(length: timedelta | float, *, is_exact: bool = False) -> str:
    """Write a duration in the active language: in its two largest units, or `is_exact` in all."""
    given = length if isinstance(length, timedelta) else timedelta(seconds=length)
    units = re.findall(r"([\d.]+) (d|h|min|s)", clock.duration_text(given, is_exact=is_exact))
    return " ".join(
        str(UNIT_LABELS[unit]).format(n=number.replace(".", formats.get_format("DECIMAL_SEPARATOR")))
        for number, unit in units
    )


def length_label(length: Length) -> str:
    """Write a delay or a span in the active language: `4 working hours, Europe/Berlin`."""
    if isinstance(length, timedelta):
        text = duration_label(abs(length), is_exact=True)
        return _("{delay} before").format(delay=text) if length < timedelta(0) else text

    def translated(found: re.Match[str]) -> str:
        number, unit, time, _before = found.groups()
        if unit is None:
            return _("at {time}").format(time=time) if time else _("before")
        shown = number.replace(".", formats.get_format("DECIMAL_SEPARATOR"))
        return (_SPAN_UNITS[unit] % (int(number) if number.isdecimal() else 2)).format(n=shown)

    return _IN_SPANS.sub(translated, length_text(length))


def delay_text(length: Length, since: str) -> str:
    """Return `30 min after paid_at` or `4 working hours after paid_at, Europe/Berlin`."""
    if isinstance(length, timedelta):
        if not length:
            return f"at {since}"
        return f"{clock.duration_text(abs(length))} {'before' if length < timedelta(0) else 'after'} {since}"
    amount, rest = _LENGTH_TEXT.fullmatch(length_text(length)).groups("")  # type: ignore[union-attr] # matches anything
    if not amount:
        return f"{since} {rest}"
    return f"{amount}{'' if amount.endswith('before') else ' after'} {since}{rest}"


UNITS = ("weeks", "days", "hours", "minutes", "seconds")


class Duration(TypedDict, total=False):
    """A duration: any of the units, added up, or `after`, a timedelta or a span."""

    weeks: float
    days: float
    hours: float
    minutes: float
    seconds: float
    after: Length


class DelayArgs(Duration, total=False):
    """A duration from now, or the datetime `at`."""

    at: datetime


class Delay(NamedTuple):
    """A parsed delay: either `after`, which is not negative, or `at` is set."""

    after: Length | None = None
    at: datetime | None = None

    @property
    def needs_object(self) -> bool:
        """Return whether the deadline depends on the object: a span has a path or a function."""
        return self.after is not None and needs_object(self.after)

    def due_from(self, start: datetime, obj: Any = None, *, as_given: bool = False) -> datetime:
        """Return the deadline of a delay that begins at `start`, and at the earliest `start` itself.

        `obj`: what a span that `needs_object` reads. `as_given`: `at` as it is, also if it is before `start`. Raises
        InvalidDelay if a span has no end for the object, or one before `start`.
        """
        if self.at is not None:
            return self.at if as_given else max(self.at, start)
        return added(self.after or timedelta(0), start, obj)

    def __str__(self) -> str:
        return str(self.at) if self.after is None else length_text(self.after)


def added(length: Length, start: datetime, obj: Any = None) -> datetime:
    """Return the end of `length` from `start`. Raises InvalidDelay: see `Delay.due_from`, or it is too far away."""
    if isinstance(length, timedelta):
        return shifted(start, length)
    due_at = end_of(length, start, obj)
    if due_at is None or due_at < start:
        why = "has no end that is supported" if due_at is None else f"ends before it begins, at {due_at}"
        raise InvalidDelay(f"{length_text(length)} {why}, from {start}.")
    return due_at


def parse_delay(given: dict[str, Any]) -> Delay | None:
    """Return the `Delay` that keyword arguments describe; None if there are none. Raises InvalidDelay."""
    units = {name: value for name, value in given.items() if value is not None}
    if not units:
        return None
    at, after = units.pop("at", None), units.pop("after", None)
    if unknown := units.keys() - UNITS:
        names = ", ".join(map(repr, sorted(unknown)))
        raise InvalidDelay(f"Unknown delay {names}; use {', '.join(UNITS)}, after or at.")
    if bool(units) + (after is not None) + (at is not None) > 1:
        raise InvalidDelay("Give either units, or after=, or at=, not a mixture.")
    if at is not None:
        return Delay(at=check_moment(at, "at"))
    if after is not None:
        return Delay(after=_checked(after))
    try:
        for name, value in units.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidDelay(f"{name} must be a number, not {value!r}.")
            if value < 0:
                raise InvalidDelay(f"{name} must not be negative, but is {value!r}.")
        return Delay(after=timedelta(**units))
    except OverflowError as error:  # also by `isfinite`, for an int beyond the floats
        # Python refuses to write an int of more than 4,300 digits.
        words = ", ".join(f"{name}={value if abs(value) < 1e18 else '...'}" for name, value in units.items())
        raise InvalidDelay(_("The delay is too long: {units}.").format(units=words)) from error


def _checked(after: Any) -> Length:
    """Return `after` as a timedelta or span; raise `InvalidDelay` for another type, or if it is negative."""
    length = as_length(after, "after")
    if is_negative(length):
        raise InvalidDelay(f"after must not be negative, but is {length_text(length)}.")
    return length
