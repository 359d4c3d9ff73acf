"""The dates above the list: drill down from year to month to day, without reading the table.

Django's own hierarchy asks for the smallest, the largest and all distinct dates, which reads every row. Here the index
on the deadline is asked for the next row after each date in turn: one probe for each date that is shown.
"""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import Q
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.models import QuerySet

FIELD = "due_at"
YEAR, MONTH, DAY = (f"{FIELD}__{unit}" for unit in ("year", "month", "day"))
MOST_YEARS = 12


@dataclass(frozen=True, slots=True)
class DateLink:
    """One date to go to; without an address it is the one that is shown."""

    words: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class DateRange:
    """From a day to before another."""

    first: date
    behind: date

    def moments(self) -> tuple[datetime, datetime]:
        """Its ends in local time."""
        return _moment(self.first), _moment(self.behind)


def chosen(params: dict[str, Any]) -> DateRange | None:
    """The year, month or day that the address names; None: no date. Raises IncorrectLookupParameters for no date."""
    if YEAR not in params:
        return None
    try:
        first = date(int(params[YEAR]), int(params.get(MONTH, 1)), int(params.get(DAY, 1)))
        if DAY in params:
            return DateRange(first, first + timedelta(days=1))
        return DateRange(first, _next_month(first) if MONTH in params else date(first.year + 1, 1, 1))
    except (ValueError, TypeError, OverflowError) as error:
        raise IncorrectLookupParameters(error) from error


def condition(shown: DateRange | None) -> Q:
    """The rows that are due then."""
    if shown is None:
        return Q()
    first, behind = shown.moments()
    return Q(**{f"{FIELD}__gte": first, f"{FIELD}__lt": behind})


def links(rows: QuerySet[Any], params: dict[str, Any], address_of: Callable[..., str]) -> list[DateLink]:
    """What the page offers: the way back up, the date that is shown, and the dates below it that have rows.

    `address_of` makes the address of the list with some parameters set anew.
    """
    shown = chosen(params)
    if shown is None:
        return [
            DateLink(str(year.year), address_of({YEAR: year.year}))
            for year in _first_days(rows, date(1, 1, 1), date.max, _next_year, MOST_YEARS)
        ]
    first = shown.first
    year, month = DateLink(str(first.year), address_of({YEAR: first.year}, [FIELD])), _named(first, "YEAR_MONTH_FORMAT")
    to_month = DateLink(month, address_of({YEAR: first.year, MONTH: first.month}, [FIELD]))
    if DAY in params:
        return [_all(address_of), year, to_month, DateLink(_named(first, "MONTH_DAY_FORMAT"))]
    if MONTH in params:
        days = _first_days(rows, first, shown.behind, _next_day, 31)
        return [_all(address_of), year, DateLink(month), *(_day_link(day, address_of) for day in days)]
    months = _first_days(rows, first, shown.behind, _next_month, 12)
    below = [
        DateLink(_named(one, "YEAR_MONTH_FORMAT"), address_of({YEAR: one.year, MONTH: one.month})) for one in months
    ]
    return [_all(address_of), DateLink(str(first.year)), *below]


def _all(address_of: Callable[..., str]) -> DateLink:
    return DateLink(_("All dates"), address_of({}, [FIELD]))


def _day_link(day: date, address_of: Callable[..., str]) -> DateLink:
    words = _named(day, "MONTH_DAY_FORMAT")
    return DateLink(words, address_of({YEAR: day.year, MONTH: day.month, DAY: day.day}))


def _named(day: date, form: str) -> str:
    return date_format(day, form)


def _first_days(
    rows: QuerySet[Any], first: date, behind: date, following: Callable[[date], date], most: int
) -> Iterator[date]:
    """The first day of each period from `first` to before `behind` in which a row is due."""
    deadlines = rows.order_by(FIELD, "id").values_list(FIELD, flat=True)
    start, end = first, _moment(behind)
    for _period in range(most):
        found = deadlines.filter(**{f"{FIELD}__gte": _moment(start), f"{FIELD}__lt": end}).first()
        if found is None:
            return
        day = timezone.localtime(found).date() if timezone.is_aware(found) else found.date()
        period = _begin(day, following)
        yield period
        start = following(period)


def _begin(day: date, following: Callable[[date], date]) -> date:
    if following is _next_year:
        return day.replace(month=1, day=1)
    return day.replace(day=1) if following is _next_month else day


def _next_year(day: date) -> date:
    return date(day.year + 1, 1, 1) if day.year < 9999 else date.max


def _next_month(day: date) -> date:
    last = calendar.monthrange(day.year, day.month)[1]
    return day.replace(day=last) + timedelta(days=1) if (day.year, day.month) < (9999, 12) else date.max


def _next_day(day: date) -> date:
    return day + timedelta(days=1) if day < date.max else day


def _moment(day: date) -> datetime:
    """The day's first moment in local time, kept so far from the calendar's ends that no zone leads out of it."""
    kept = min(max(day, date(1, 1, 3)), date(9999, 12, 29))
    moment = datetime(kept.year, kept.month, kept.day)  # noqa: DTZ001 - made aware where Django is
    return timezone.make_aware(moment) if settings.USE_TZ else moment
