"""The delay grammar, the same everywhere: units summed, or `after=timedelta`, or `at=datetime`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

from django.conf import settings
from django.utils import timezone
from django.utils.duration import duration_string
from django.utils.translation import gettext as _

from django_delayq.exceptions import InvalidDelay

UNITS = ("weeks", "days", "hours", "minutes", "seconds")
# Redis scores hold moments up to the year 2109 exactly; nobody's business waits longer.
LATEST_YEAR = 2109


class Span(TypedDict, total=False):
    """A length of time: any of the units, summed, or `after`."""

    weeks: float
    days: float
    hours: float
    minutes: float
    seconds: float
    after: timedelta


class DelayArgs(Span, total=False):
    """A length of time from now, or the moment `at` itself."""

    at: datetime


@dataclass(frozen=True, slots=True)
class Delay:
    """A parsed delay: exactly one of `after` (a length, never negative) and `at` (a moment) is set."""

    after: timedelta | None = None
    at: datetime | None = None

    def due_from(self, moment: datetime) -> datetime:
        """The deadline when the delay starts to count at `moment`; an `at` that has passed means `moment`."""
        if self.at is not None:
            return max(self.at, moment)
        return shifted(moment, self.after or timedelta(0))


def shifted(moment: datetime, by: timedelta) -> datetime:
    """`moment + by`, or `InvalidDelay` if that lies beyond what can be kept. An aware moment comes out in UTC.

    Before the sum: Python adds to the clock on the wall, also where clocks are changed in between, and forgets which
    of two equal hours was meant. The deadline would be an hour early.
    """
    try:
        due = (moment.astimezone(UTC) if timezone.is_aware(moment) else moment) + by
    except OverflowError:
        due = None
    if due is None or due.year > LATEST_YEAR - 1:
        raise InvalidDelay(_too_far(moment, by))
    return due


def _too_far(moment: datetime, by: timedelta) -> str:
    """In the reader's language, as what somebody has typed into a form may lead here."""
    day, last = f"{moment:%Y-%m-%d}", LATEST_YEAR - 1
    if not by:
        return _("{moment} lies too far away; the last year is {year}.").format(moment=day, year=last)
    words = _("A deadline {length} from {moment} lies too far away; the last year is {year}.")
    return words.format(length=duration_string(by), moment=day, year=last)


def parse_delay(given: dict[str, Any]) -> Delay | None:
    """The `Delay` that keyword arguments describe; None when there are none.

    Raises:
        InvalidDelay: unknown keyword, two forms mixed, negative or non-finite, wrong type, or a naive
            datetime under `USE_TZ=True` (aware under `USE_TZ=False`).
    """
    given = {name: value for name, value in given.items() if value is not None}
    unknown = set(given) - {*UNITS, "after", "at"}
    if unknown:
        raise InvalidDelay(
            f"Unknown delay {', '.join(map(repr, sorted(unknown)))}; use {', '.join(UNITS)}, after or at."
        )
    units = {name: value for name, value in given.items() if name in UNITS}
    if bool(units) + ("after" in given) + ("at" in given) > 1:
        raise InvalidDelay("Give either units, or after=, or at=, not a mixture.")
    if "at" in given:
        return Delay(at=check_moment(given["at"], "at"))
    if "after" in given:
        return Delay(after=check_length(given["after"], "after"))
    return Delay(after=_summed(units)) if units else None


def check_length(value: Any, name: str) -> timedelta:
    """`value` if it is a timedelta that is not negative; else `InvalidDelay`."""
    if not isinstance(value, timedelta):
        raise InvalidDelay(f"{name} must be a timedelta, not {type(value).__name__}.")
    if value < timedelta(0):
        raise InvalidDelay(f"{name} must not be negative, but is {value}.")
    return value


def check_moment(value: Any, name: str) -> datetime:
    """`value`, in UTC if aware, if it is a datetime whose awareness fits `USE_TZ`; else `InvalidDelay`."""
    if not isinstance(value, datetime):
        raise InvalidDelay(f"{name} must be a datetime, not {type(value).__name__}.")
    if settings.USE_TZ and timezone.is_naive(value):
        raise InvalidDelay(f"{name} is a naive datetime ({value}), but USE_TZ is True: add a time zone.")
    if not settings.USE_TZ and timezone.is_aware(value):
        raise InvalidDelay(f"{name} is an aware datetime ({value}), but USE_TZ is False: use timezone.make_naive().")
    return shifted(value, timedelta(0))


def _summed(units: dict[str, Any]) -> timedelta:
    for name, value in units.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidDelay(f"{name} must be a number, not {value!r}.")
        if value < 0:
            raise InvalidDelay(f"{name} must not be negative, but is {value!r}.")
    try:
        return timedelta(**units)
    except OverflowError as error:
        given = ", ".join(f"{name}={value}" for name, value in units.items())
        raise InvalidDelay(_("That is longer than time goes: {units}.").format(units=given)) from error
