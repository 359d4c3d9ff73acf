"""The delay arguments of all calls: units that are added up, or `after=timedelta`, or `at=datetime`."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypedDict

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _

from django_delayq.exceptions import InvalidDelay

UNITS = ("weeks", "days", "hours", "minutes", "seconds")
LATEST_YEAR = 2108
"""Redis scores represent datetimes to the millisecond until 2109."""


class Span(TypedDict, total=False):
    """A duration: any of the units, added up, or `after`."""

    weeks: float
    days: float
    hours: float
    minutes: float
    seconds: float
    after: timedelta


class DelayArgs(Span, total=False):
    """A duration from now, or the datetime `at`."""

    at: datetime


class Delay(NamedTuple):
    """A parsed delay: either `after`, which is not negative, or `at` is set."""

    after: timedelta | None = None
    at: datetime | None = None

    def due_from(self, start: datetime) -> datetime:
        """Return the deadline of a delay that begins at `start`, and at the earliest `start` itself."""
        if self.at is not None:
            return max(self.at, start)
        return shifted(start, self.after or timedelta(0))


def shifted(start: datetime, by: timedelta) -> datetime:
    """Return `start + by`, in UTC if aware. Raises InvalidDelay if that is after `LATEST_YEAR`, or before the year 1.

    Converts to UTC before adding: Python adds to local time, which would be an hour off if the clocks change in
    between, and does not keep which of two equal hours was meant.
    """
    try:
        due = (start.astimezone(UTC) if timezone.is_aware(start) else start) + by
    except OverflowError:
        due = None
    if due is None or due.year > LATEST_YEAR:
        # Translated, because users may have entered the delay in a form.
        day = f"{start:%Y-%m-%d}"
        if by < timedelta(0):
            text = _("A deadline {length} before {start} is too far in the past: there is no year before 1.")
            raise InvalidDelay(text.format(length=duration_text(-by), start=day))
        if not by:
            text = _("{start} is too far in the future: the latest supported year is {year}.")
            raise InvalidDelay(text.format(start=day, year=LATEST_YEAR))
        text = _("A deadline {length} from {start} is too far in the future: the latest supported year is {year}.")
        raise InvalidDelay(text.format(length=duration_text(by), start=day, year=LATEST_YEAR))
    return due


def parse_delay(given: dict[str, Any]) -> Delay | None:
    """Return the `Delay` that keyword arguments describe; None if there are none. Raises InvalidDelay."""
    units = {name: value for name, value in given.items() if value is not None}
    if not units:
        return None
    at, after = units.pop("at", None), units.pop("after", None)
    if unknown := units.keys() - UNITS:
        raise InvalidDelay(
            f"Unknown delay {', '.join(map(repr, sorted(unknown)))}; use {', '.join(UNITS)}, after or at."
        )
    if bool(units) + (after is not None) + (at is not None) > 1:
        raise InvalidDelay("Give either units, or after=, or at=, not a mixture.")
    if at is not None:
        return Delay(at=check_moment(at, "at"))
    if after is not None:
        return Delay(after=check_length(after, "after"))
    for name, value in units.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidDelay(f"{name} must be a number, not {value!r}.")
        if value < 0:
            raise InvalidDelay(f"{name} must not be negative, but is {value!r}.")
    try:
        return Delay(after=timedelta(**units))
    except OverflowError as error:
        words = ", ".join(f"{name}={value}" for name, value in units.items())
        raise InvalidDelay(_("The delay is too long: {units}.").format(units=words)) from error


def check_length(value: Any, name: str, *, may_be_negative: bool = False) -> timedelta:
    """Return `value` if it is a timedelta and not negative; otherwise raise `InvalidDelay`.

    `may_be_negative`: for a policy that counts from the `since` of its object, and may be due before it.
    """
    if not isinstance(value, timedelta):
        raise InvalidDelay(f"{name} must be a timedelta, not {type(value).__name__}.")
    if value < timedelta(0) and not may_be_negative:
        raise InvalidDelay(f"{name} must not be negative, but is {duration_text(value)}.")
    return value


def duration_text(value: timedelta, *, is_exact: bool = True) -> str:
    """Return `1 d 12 h`, `30 min`, `0.25 s` or `-1 h`, as everywhere but on translated pages.

    `is_exact=False`: the two largest units, and whole seconds from ten seconds on.
    """
    left = abs(value)
    if not is_exact:
        left = timedelta(seconds=round(left.total_seconds(), 3 if left < timedelta(seconds=10) else 0))
    counts = []
    for unit, size in (("d", timedelta(days=1)), ("h", timedelta(hours=1)), ("min", timedelta(minutes=1))):
        count, left = divmod(left, size)
        counts.append(f"{count} {unit}" if count else "")
    seconds = f"{left.total_seconds():.6f}".rstrip("0").rstrip(".")
    counts.append(f"{seconds} s" if left or not any(counts) else "")
    first = next(place for place, count in enumerate(counts) if count)
    shown = counts if is_exact else counts[first : first + 2]
    return f"{'-' if value < timedelta(0) else ''}{' '.join(filter(None, shown))}"


def brief(seconds: float) -> str:
    """Return a duration for logs: `4 ms`, or as `duration_text` in its two largest units."""
    if 0 < abs(seconds) < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return duration_text(timedelta(seconds=round(seconds, 1)), is_exact=False)


def counted(number: object, one: str, many: str = "") -> str:
    """Return `1 timeout`, `2 timeouts` or `1,000+ timeouts`, as everywhere but on translated pages.

    Args:
        number: an int, or what is shown as one.
        one: the words after 1.
        many: the words after another number; empty: `one` with an s.
    """
    return f"{number} {one if str(number) == '1' else many or f'{one}s'}"


def check_moment(value: Any, name: str) -> datetime:
    """Return `value`, in UTC if aware; raise `InvalidDelay` unless it is a datetime whose awareness fits `USE_TZ`."""
    if not isinstance(value, datetime):
        raise InvalidDelay(f"{name} must be a datetime, not {type(value).__name__}.")
    if settings.USE_TZ and timezone.is_naive(value):
        raise InvalidDelay(f"{name} is a naive datetime ({value}), but USE_TZ is True: add a time zone.")
    if not settings.USE_TZ and timezone.is_aware(value):
        raise InvalidDelay(f"{name} is an aware datetime ({value}), but USE_TZ is False: use timezone.make_naive().")
    return shifted(value, timedelta(0))
