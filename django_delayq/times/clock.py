"""This process's clock, which is only used to compute deadlines, and how datetimes and durations are checked and shown.

The clock of the database decides whether a row is due: see `sql.now`. `set_to()` replaces both, for tests and for the
replay of recorded orders.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _

from django_delayq.exceptions import InvalidDelay

_EPOCH, _MILLISECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)
_lock = threading.Lock()
_moments: tuple[datetime, ...] = ()
"""The datetimes of the present blocks of `set_to`, the innermost last. Other threads read it: replace it as a whole."""


def now() -> datetime:
    """Return the time by this process's clock: aware under `USE_TZ=True`, otherwise naive local time, as in Django."""
    moments = _moments
    return moments[-1] if moments else timezone.now()


@contextmanager
def set_to(moment: datetime) -> Iterator[None]:
    """Set both clocks, in all threads of this process, to `moment` until the block ends. May be nested.

    The end of a block also ends the blocks that began after it.

    Raises TypeError if `moment` is not a datetime, and ValueError if its awareness does not fit `USE_TZ`.
    """
    if not isinstance(moment, datetime):
        raise TypeError(
            f"The clock is set to a datetime, not to {moment!r}. To move it by a duration, add that to clock.now()."
        )
    global _moments  # noqa: PLW0603 - worker threads must see it too, so neither a context variable nor a thread local
    if timezone.is_aware(moment) != settings.USE_TZ:
        kind = "aware" if settings.USE_TZ else "naive"
        raise ValueError(f"With USE_TZ={settings.USE_TZ} the datetime must be {kind}.")
    with _lock:
        depth = len(_moments)
        _moments = (*_moments, moment)
    try:
        yield
    finally:
        with _lock:
            _moments = _moments[:depth]


def is_set() -> bool:
    """Return whether `set_to`, freezegun or time-machine has replaced the clock."""
    if _moments:
        return True
    # Not imported here: a process that has not imported them has not replaced its clock either.
    freezegun, time_machine = sys.modules.get("freezegun.api"), sys.modules.get("time_machine")
    return bool(freezegun and freezegun.freeze_factories) or bool(
        time_machine and time_machine.escape_hatch.is_travelling()
    )


def in_own_zone() -> AbstractContextManager[Any]:
    """Let a query of the block read days and hours in `TIME_ZONE`, whatever zone a request or a handler has activated.

    Otherwise a condition on the day of the week would be another one for each customer.
    """
    return timezone.override(timezone.get_default_timezone())


def aware(moment: datetime) -> datetime:
    """Return `moment` as an aware datetime.

    A naive one is in the active time zone, or without `USE_TZ` in `TIME_ZONE`, which no request can change.
    """
    if timezone.is_aware(moment):
        return moment
    return timezone.make_aware(moment, None if settings.USE_TZ else timezone.get_default_timezone())


def fitting(moment: datetime) -> datetime:
    """Return `moment` as `USE_TZ` has datetimes: aware, or naive in `TIME_ZONE`."""
    if settings.USE_TZ:
        return aware(moment)
    return timezone.make_naive(moment, timezone.get_default_timezone()) if timezone.is_aware(moment) else moment


def in_utc(moment: datetime) -> datetime:
    """Return an aware `moment` in UTC, and a naive one unchanged.

    For datetimes that users have entered: PostgreSQL refuses offsets of 16 hours and more, which ISO 8601 allows.
    """
    return moment.astimezone(UTC) if timezone.is_aware(moment) else moment


def local(moment: datetime) -> datetime:
    """Return `moment` in the active time zone; a naive one is in it, and remains naive."""
    return timezone.localtime(moment) if timezone.is_aware(moment) else moment


def to_ms(moment: datetime) -> int:
    """Return the milliseconds since 1970 UTC, rounded up, so that a worker is not woken before the row is due."""
    return -((_EPOCH - aware(moment)) // _MILLISECOND)


MAX_DURATION = timedelta(days=36_500)
"""Of settings and options: with longer ones, datetimes would overflow inside a caller's `save()`."""
LATEST_YEAR = 2108
"""Redis scores represent datetimes to the millisecond until 2109."""
_END = datetime(LATEST_YEAR + 1, 1, 1, tzinfo=UTC)
LONGEST = _END - _EPOCH
"""A longer duration leads from no datetime since 1970 to a supported one."""


def within_calendar(start: datetime, by: timedelta = timedelta(0)) -> datetime | None:
    """Return `start + by`, in UTC if aware; None if that is after `LATEST_YEAR`, or before the year 1.

    Converts to UTC before adding: Python adds to local time, which would be an hour off if the clocks change in
    between, and does not keep which of two equal hours was meant.
    """
    try:
        moment = in_utc(start) + by
    except OverflowError:
        return None
    return moment if moment.year <= LATEST_YEAR else None


def latest_start(by: timedelta = timedelta(0)) -> datetime:
    """Return the datetime that `start` is before if there is a `within_calendar(start, by)`, for SQL.

    `by` is not negative, and at most `LONGEST`.
    """
    return fitting(_END) - by


def shifted(start: datetime, by: timedelta) -> datetime:
    """Return `start + by`, in UTC if aware. Raises InvalidDelay if that is not `within_calendar`."""
    due = within_calendar(start, by)
    if due is None:
        # Translated, because users may have entered the delay in a form.
        if by < timedelta(0):
            text = _("A deadline {length} before {start} is too far in the past: there is no year before 1.")
        elif by:
            text = _("A deadline {length} from {start} is too far in the future: the latest supported year is {year}.")
        else:
            text = _("{start} is too far in the future: the latest supported year is {year}.")
        raise InvalidDelay(text.format(length=duration_text(abs(by)), start=f"{start:%Y-%m-%d}", year=LATEST_YEAR))
    return due


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


def plural(number: object, one: str, many: str = "") -> str:
    """Return `1 timeout`, `2 timeouts` or `1,000+ timeouts`, as everywhere but on translated pages.

    Args:
        number: an int, or what is shown as one.
        one: the words after 1.
        many: the words after another number; empty: `one` with an s.
    """
    return f"{number} {one if str(number) == '1' else many or f'{one}s'}"


def check_moment(value: Any, name: str) -> datetime:
    """Return `value`, in UTC if aware; raise `InvalidDelay` unless it is a supported datetime that fits `USE_TZ`."""
    return shifted(check_awareness(value, name), timedelta(0))


def check_awareness(value: Any, name: str) -> datetime:
    """Return `value`; raise `InvalidDelay` unless it is a datetime whose awareness fits `USE_TZ`."""
    if not isinstance(value, datetime):
        raise InvalidDelay(f"{name} must be a datetime, not {type(value).__name__}.")
    if settings.USE_TZ and timezone.is_naive(value):
        raise InvalidDelay(f"{name} is a naive datetime ({value}), but USE_TZ is True: add a time zone.")
    if not settings.USE_TZ and timezone.is_aware(value):
        raise InvalidDelay(f"{name} is an aware datetime ({value}), but USE_TZ is False: use timezone.make_naive().")
    return value
