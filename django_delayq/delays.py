"""The delays that callers give: units that are added up, `after=`, or `at=`."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict

from django.utils.translation import gettext as _

from django_delayq.clock import check_moment, shifted
from django_delayq.exceptions import InvalidDelay
from django_delayq.lengths import as_length, end_of, is_negative, length_text, needs_object
from django_delayq.spans import Length

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
