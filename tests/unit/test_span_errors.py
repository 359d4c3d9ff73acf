"""Spans: what they refuse when they are declared, and what has no end when it is used."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from dateutil.relativedelta import relativedelta

from django_delayq.exceptions import InvalidDelay
from django_delayq.times import lengths, spans
from django_delayq.times.calendars import WorkingHours
from django_delayq.times.lengths import as_length, end_of
from django_delayq.times.spans import Length, Wall, Working
from tests.unit.spans import Answers, ticket

OFFICE = WorkingHours("Europe/Berlin", {"mon-fri": ("09:00-12:30", "13:00-17:00")})
NEVER = WorkingHours("UTC", {"mon": "09:00-17:00"}, holidays=lambda day: True)
THURSDAY = datetime(2026, 11, 5, 14, tzinfo=UTC)


@pytest.mark.parametrize("length", [Working(hours=1, calendar=NEVER), Working(days=1, calendar=NEVER)], ids=str)
def test_a_calendar_that_never_opens_is_refused_at_use(length: Length) -> None:
    with pytest.raises(InvalidDelay, match="mon 09:00-17:00, UTC is closed for 366 days"):
        end_of(length, THURSDAY, None)


@pytest.mark.parametrize(
    "length",
    [
        timedelta(days=40_000),
        Wall(years=100),
        Wall(years=-138, months=-1600, weeks=-7000, days=-50_000),
        Working(days=40_000, calendar=OFFICE),
        Working(hours=300_000, calendar=OFFICE),
        as_length(relativedelta(years=7999), "after"),
    ],
    ids=str,
)
def test_an_end_beyond_the_supported_years_is_none(length: Length) -> None:
    since = datetime(2020, 6, 1, tzinfo=UTC)
    found = end_of(length, since, None)
    assert found is None or found.year < 1970
    if not lengths.is_negative(length):
        assert found is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (datetime(2027, 1, 1), "The end of 'a broken span' is a naive datetime"),  # noqa: DTZ001
        (date(2027, 1, 1), "The end of 'a broken span' must be a datetime, not date"),
        (5, "The end of 'a broken span' must be a datetime, not int"),
    ],
)
def test_a_span_that_returns_something_else_is_refused(answer: Any, message: str) -> None:
    with pytest.raises(InvalidDelay, match=message):
        end_of(Answers(answer), THURSDAY, None)


@pytest.mark.parametrize(
    "length", [Wall(days=1), Working(days=1, calendar=OFFICE), as_length(relativedelta(days=1), "x")]
)
def test_a_length_without_a_time_of_day_does_not_count_from_a_date(length: Length) -> None:
    with pytest.raises(InvalidDelay, match='2026-11-05 is a date: add at="HH:MM"'):
        end_of(length, date(2026, 11, 5), None)


def test_an_object_with_something_else_than_a_calendar_or_zone_is_refused() -> None:
    with pytest.raises(
        InvalidDelay, match="The calendar of '1 working hour, team__calendar' is 'mon-fri', which lacks"
    ):
        end_of(Working(hours=1, calendar="team__calendar"), THURSDAY, ticket(calendar="mon-fri"))
    for zone in ("Mars/Olympus", 5, timedelta(1)):
        with pytest.raises(InvalidDelay, match="The zone of 'at 08:00, team__zone' is wrong:"):
            end_of(Wall(at="08:00", zone="team__zone"), THURSDAY, ticket(zone=zone))
    with pytest.raises(AttributeError, match="'types.SimpleNamespace' object has no attribute 'zone'"):
        end_of(Wall(at="08:00", zone="team__zone"), THURSDAY, ticket())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "takes hours and minutes, or days"),
        ({"hours": 1, "days": 1}, TypeError, "24 open hours are three days"),
        ({"hours": 1, "at": "09:00"}, TypeError, "only together with days"),
        ({"hours": True}, TypeError, "hours must be a number, not True"),
        ({"days": 1.5}, TypeError, r"days must be an int, not 1\.5"),
        ({"days": 1, "at": time(9, tzinfo=UTC)}, TypeError, "or a datetime.time without a zone, not datetime.time"),
        ({"hours": 1, "calendar": WorkingHours}, TypeError, "calendar must be a Calendar"),
        ({"hours": float("nan")}, ValueError, "hours=nan leads beyond the supported years"),
        ({"days": 10**400}, ValueError, "leads beyond the supported years"),
        ({"days": 1, "at": "25:00"}, ValueError, "at='25:00' is not a time of day"),
        ({"hours": 1, "calendar": "team.calendar"}, ValueError, 'nor a path such as "team__calendar"'),
    ],
)
def test_working_refuses_what_makes_no_sense(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Working(**{"calendar": OFFICE, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "needs years, months, weeks, days or at"),
        ({"months": "1"}, ValueError, "months='1' is neither a number nor a path"),
        ({"months": True}, TypeError, "months must be an int"),
        ({"years": 200}, ValueError, "years=200 leads beyond the supported years"),
        ({"days": 1, "zone": "Europe/Berln"}, ValueError, "zone='Europe/Berln' is neither an IANA name"),
        ({"days": 1, "zone": ZoneInfo}, TypeError, "zone must be an IANA name"),
    ],
)
def test_wall_refuses_what_makes_no_sense(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Wall(**arguments)


def test_months_and_years_need_dateutil_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dateutil.relativedelta", None)
    spans._relativedelta.cache_clear()
    for call in (lambda: Wall(months=1), lambda: Wall(years=-1)):
        with pytest.raises(ImportError, match=r"needs python-dateutil: pip install django-delayq\[calendars\]"):
            call()
    assert end_of(Wall(weeks=1, days=1), THURSDAY, None) == THURSDAY + timedelta(days=8)
    assert end_of(Working(hours=1, calendar=OFFICE), THURSDAY, None) == THURSDAY + timedelta(hours=1)
    with pytest.raises(InvalidDelay, match="after must be a timedelta"):
        as_length(relativedelta(months=1), "after")
