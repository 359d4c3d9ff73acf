"""Spans: what each of them ends at, how they are read, moved and displayed, and what they refuse."""

from __future__ import annotations

import calendar as months
import sys
from datetime import UTC, date, datetime, time, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from dateutil.relativedelta import FR, relativedelta
from django.core.exceptions import ObjectDoesNotExist
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import Settings

from django_delayq.exceptions import InvalidDelay
from django_delayq.times import lengths, spans
from django_delayq.times.calendars import WorkingHours, instant_of
from django_delayq.times.lengths import OwnTime, as_length, end_of, resized
from django_delayq.times.spans import Length, Wall, Working
from tests.support.examples import examples
from tests.unit.minutes import MIDDLES, MINUTE, Case, Count, cases

BERLIN = ZoneInfo("Europe/Berlin")
NEVER = WorkingHours("UTC", {"mon": "09:00-17:00"}, holidays=lambda day: True)
OFFICE = WorkingHours("Europe/Berlin", {"mon-fri": ("09:00-12:30", "13:00-17:00")}, holidays={date(2026, 12, 25)})
THURSDAY = datetime(2026, 11, 5, 15, 0, tzinfo=BERLIN)
SPAN_OF_A_WEEK = timedelta(days=7)
many = examples(40)


def read(moment: datetime | None) -> str:
    """Return a deadline as people in Berlin read it."""
    assert moment is not None
    assert moment.tzinfo is UTC
    return f"{moment.astimezone(BERLIN):%a %d %b %Y %H:%M}"


def elapsed(length: Length, start: datetime, end: datetime, obj: Any) -> timedelta:
    return OwnTime(length, obj).elapsed(start, end)


def ticket(**team: Any) -> SimpleNamespace:
    """An object for the tests of spans."""
    return SimpleNamespace(team=SimpleNamespace(**team))


class Answers:
    """A span that returns what it is given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def end(self, since: datetime | date, obj: Any) -> Any:
        return self.answer

    def __str__(self) -> str:
        return "a broken span"


class UntilNewYear:
    """A span that is not built in."""

    def end(self, since: datetime | date, obj: Any) -> datetime | None:
        return datetime(since.year + 1, 1, 1, tzinfo=UTC)

    def __str__(self) -> str:
        return "until New Year"


# Examples


@pytest.mark.parametrize(
    ("length", "end"),
    [
        (timedelta(hours=1), "Thu 05 Nov 2026 16:00"),
        (Working(hours=1, calendar=OFFICE), "Thu 05 Nov 2026 16:00"),
        (Working(hours=4, calendar=OFFICE), "Fri 06 Nov 2026 11:00"),
        (Working(hours=0.5, minutes=15, calendar=OFFICE), "Thu 05 Nov 2026 15:45"),
        (Working(hours=-4, calendar=OFFICE), "Thu 05 Nov 2026 10:30"),
        (Working(days=1, calendar=OFFICE), "Fri 06 Nov 2026 15:00"),
        (Working(days=3, at="09:00", calendar=OFFICE), "Tue 10 Nov 2026 09:00"),
        (Wall(weeks=1, at="08:00", zone="Europe/Berlin"), "Thu 12 Nov 2026 08:00"),
        (Wall(years=1, months=1, days=-5, zone=BERLIN), "Tue 30 Nov 2027 15:00"),
        (Wall(at=time(8), zone="Asia/Tokyo"), "Thu 05 Nov 2026 00:00"),
        (Wall(at="18:00"), "Thu 05 Nov 2026 22:00"),  # of TIME_ZONE
        (UntilNewYear(), "Fri 01 Jan 2027 01:00"),
    ],
    ids=str,
)
def test_the_end_of_a_length_that_begins_on_a_thursday_at_three(length: Length, end: str) -> None:
    assert read(end_of(length, THURSDAY, None)) == end
    assert read(end_of(length, THURSDAY.astimezone(UTC), None)) == end


# What differs from object to object


def test_a_path_or_a_callable_finds_the_calendar_or_the_zone_of_an_object() -> None:
    for source in ("team__calendar", lambda obj: obj.team.calendar):
        length, obj = Working(hours=4, calendar=source), ticket(calendar=OFFICE)
        assert read(end_of(length, THURSDAY, obj)) == "Fri 06 Nov 2026 11:00"
        assert elapsed(length, THURSDAY, THURSDAY + SPAN_OF_A_WEEK, obj) == timedelta(hours=37.5)
    for zone in ("Asia/Tokyo", ZoneInfo("Asia/Tokyo")):
        end = end_of(Wall(at="08:00", zone="team__zone"), date(2026, 11, 5), ticket(zone=zone))
        assert end == datetime(2026, 11, 4, 23, tzinfo=UTC)
    assert end_of(Wall(at="08:00", zone="team__zone"), THURSDAY, ticket(zone="")) is None


class Orphan:
    @property
    def team(self) -> Any:
        raise ObjectDoesNotExist("as a one-to-one relation does from its other side")


@pytest.mark.parametrize(
    "length",
    [
        Working(hours=4, calendar="team__calendar"),
        Working(days=4, calendar=lambda obj: None),
        Wall(at="08:00", zone="team__calendar"),
        Answers(None),
    ],
    ids=str,
)
def test_an_object_without_calendar_or_zone_is_exempt(length: Length) -> None:
    for obj in (ticket(calendar=None), SimpleNamespace(team=None), Orphan()):
        assert end_of(length, THURSDAY, obj) is None
        assert elapsed(length, THURSDAY, THURSDAY + SPAN_OF_A_WEEK, obj) == SPAN_OF_A_WEEK
        assert OwnTime(length, obj).forward(THURSDAY, SPAN_OF_A_WEEK) == THURSDAY + SPAN_OF_A_WEEK


# The same answers as other arithmetic


@many
@given(
    middle=st.sampled_from(MIDDLES),
    shift=st.tuples(st.integers(-2, 2), st.integers(-14, 14), st.integers(-2, 2), st.integers(-9, 9)),
    at=st.one_of(st.none(), st.integers(0, 47).map(lambda halves: time(halves // 2, 30 * (halves % 2)))),
    minutes=st.integers(-3000, 3000),
)
def test_wall_time_is_calendar_arithmetic_and_then_a_clock_in_that_place(
    middle: tuple[str, datetime], shift: tuple[int, int, int, int], at: time | None, minutes: int
) -> None:
    """The deadline is near a change of the clocks, and counted from a wall time that leads there."""
    name, change = middle
    zone = ZoneInfo(name)
    years, number, weeks, days = shift
    aim = (change + minutes * MINUTE).astimezone(zone).replace(tzinfo=None)
    back = aim - timedelta(weeks=weeks, days=days)
    since = instant_of(_months_later(back, -12 * years - number), zone)
    wall = _months_later(since.astimezone(zone).replace(tzinfo=None), 12 * years + number)
    wall += timedelta(weeks=weeks, days=days)
    wall = datetime.combine(wall, at or wall.time())
    if not (years or number or weeks or days or at):
        return
    span = Wall(years=years, months=number, weeks=weeks, days=days, at=at, zone=name)
    assert end_of(span, since, None) == _instant(wall, zone)


def _months_later(wall: datetime, number: int) -> datetime:
    year, month = divmod(wall.year * 12 + wall.month - 1 + number, 12)
    return wall.replace(year=year, month=month + 1, day=min(wall.day, months.monthrange(year, month + 1)[1]))


def _instant(wall: datetime, zone: ZoneInfo) -> datetime:
    """Return the last minute of UTC at which the clocks show `wall`, or else the first at which they show more."""
    around = [wall.replace(tzinfo=UTC) + number * MINUTE for number in range(-27 * 60, 27 * 60)]
    walls = [moment.astimezone(zone).replace(tzinfo=None, fold=0) for moment in around]
    same = [moment for moment, other in zip(around, walls, strict=True) if other == wall.replace(fold=0)]
    if same:
        return same[-1]
    return next(moment for moment, other in zip(around, walls, strict=True) if other > wall)


@many
@given(case=cases(), minutes=st.integers(-3000, 3000).filter(bool))
def test_working_hours_and_the_time_that_counts_agree_with_a_count_of_minutes(case: Case, minutes: int) -> None:
    length, count = Working(minutes=minutes, calendar=case.calendar), Count(case)
    expected = count.add(case.start, 60 * minutes)
    end = end_of(length, case.start, None)
    assert end is not None
    assert expected is None or end == expected
    assert elapsed(length, case.start, end, None) == minutes * MINUTE
    if minutes > 0:
        assert OwnTime(length).forward(case.start, minutes * MINUTE) == end


@many
@given(case=cases(), n=st.integers(-5, 5), at=st.integers(0, 1439))
def test_working_days_end_at_the_wall_time_of_their_day(case: Case, n: int, at: int) -> None:
    zone, local_time = ZoneInfo(case.zone), time(at // 60, at % 60)
    day = case.start.astimezone(zone).date()
    step = timedelta(days=1 if n >= 0 else -1)
    if n == 0 and not case.begins_on(day):
        n = 1
    for _ in range(abs(n)):
        day += step
        while not case.begins_on(day):
            day += step
    span = Working(days=n, at=local_time, calendar=case.calendar)
    assert end_of(span, case.start, None) == _instant(datetime.combine(day, local_time), zone)


# The time that counts: for clocks that are stopped and continue


def test_a_clock_does_not_continue_beyond_the_supported_years() -> None:
    rare = WorkingHours("UTC", {"mon": "09:00-09:01"})  # a minute a week
    for length, by in (
        (timedelta(1), 40_000),
        (Working(hours=1, calendar=rare), 3),
        (Working(days=1, calendar=rare), 300),
    ):
        with pytest.raises(InvalidDelay, match="latest supported year"):
            OwnTime(length).forward(THURSDAY, timedelta(days=by))


# What is asked about a length

LENGTHS: list[tuple[Length, str, dict[str, Any]]] = [
    (timedelta(minutes=30), "30 min", {}),
    (-timedelta(hours=1), "-1 h", {"negative": True}),
    (Working(hours=1, minutes=30, calendar=OFFICE), "1 working hour 30 minutes, Europe/Berlin", {}),
    (Working(minutes=1.5, calendar=OFFICE), "1.5 working minutes, Europe/Berlin", {}),
    (Working(hours=-4, calendar=OFFICE), "4 working hours before, Europe/Berlin", {"negative": True}),
    (Working(hours=1, minutes=-90, calendar=OFFICE), "1 working hour -90 minutes, Europe/Berlin", {"negative": True}),
    (
        Working(days=3, at="09:00", calendar="team__calendar"),
        "3 working days at 09:00, team__calendar",
        {"object": True, "path": "team__calendar", "relation": "team", "wall_time": True},
    ),
    (Working(days=0, calendar=OFFICE), "0 working days, Europe/Berlin", {}),
    (Working(days=2, calendar=len), "2 working days, len", {"object": True}),
    (
        Wall(months=-1, at="08:00", zone="shop__city__zone"),
        "1 month before, at 08:00, shop__city__zone",
        {"object": True, "path": "shop__city__zone", "relation": "shop__city", "wall_time": True, "negative": True},
    ),
    (Wall(at="18:00"), "at 18:00", {"wall_time": True}),
    (Wall(years=1, months=2, weeks=3, days=4, zone="Asia/Tokyo"), "1 year 2 months 3 weeks 4 days, Asia/Tokyo", {}),
    (Wall(days=10, weeks=-2), "-2 weeks 10 days", {"negative": True}),
    (as_length(relativedelta(months=-1, days=-2), "after"), "1 month 2 days before", {"negative": True}),
    (as_length(relativedelta(months=+1, day=31, weekday=FR(-1)), "after"), "1 month, day=31, weekday=FR(-1)", {}),
    (as_length(relativedelta(days=1, hour=9, minute=0), "after"), "1 day, hour=9, minute=0", {"wall_time": True}),
    (as_length(relativedelta(), "after"), "0 days", {}),
    (UntilNewYear(), "until New Year", {"object": True, "wall_time": True}),
]


@pytest.mark.parametrize(("length", "text", "facts"), LENGTHS, ids=[text for _, text, _ in LENGTHS])
def test_what_other_modules_ask_about_a_length(length: Length, text: str, facts: dict[str, Any]) -> None:
    assert lengths.length_text(length) == text
    assert lengths.needs_object(length) == facts.get("object", False)
    assert lengths.paths_of(length) == ((facts["path"],) if "path" in facts else ())
    assert lengths.relations_of(length) == ((facts["relation"],) if "relation" in facts else ())
    assert lengths.has_wall_time(length) == facts.get("wall_time", False)
    assert lengths.is_negative(length) == facts.get("negative", False)


def test_another_delay_of_an_operator_is_counted_in_the_calendar_of_the_policy() -> None:
    working, days = Working(hours=4, calendar=OFFICE), Working(days=3, at="09:00", calendar="team__calendar")
    wall = Wall(months=-1, at="08:00", zone="tenant__zone")
    assert resized(working, timedelta(hours=6)) == Working(hours=6, calendar=OFFICE)
    assert resized(working, timedelta(hours=1.5)) == Working(minutes=90, calendar=OFFICE)
    assert resized(working, timedelta(seconds=90)) == Working(minutes=1.5, calendar=OFFICE)
    assert resized(days, timedelta(days=5)) == Working(days=5, at="09:00", calendar="team__calendar")
    assert resized(wall, timedelta(days=-14)) == Wall(days=-14, at="08:00", zone="tenant__zone")
    for length in (timedelta(1), Wall(months=1), UntilNewYear(), as_length(relativedelta(months=1), "after")):
        assert resized(length, timedelta(hours=6)) == timedelta(hours=6)
    for length in (days, wall):
        with pytest.raises(InvalidDelay, match="counts days: 1 d 12 h must be a number of whole days"):
            resized(length, timedelta(days=1.5), strict=True)
        assert resized(length, timedelta(days=1.5)) == timedelta(days=1.5), "no save fails after the code has changed"


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(0), "at paid_at"),
        (timedelta(hours=-1), "1 h before paid_at"),
        (Working(days=3, at="09:00", calendar="calendar"), "3 working days after paid_at at 09:00, calendar"),
        (Wall(months=-1, at="08:00", zone="UTC"), "1 month before paid_at, at 08:00, UTC"),
        (Wall(at="18:00", zone="UTC"), "paid_at at 18:00, UTC"),
    ],
    ids=str,
)
def test_a_delay_is_described_with_what_it_counts_from(length: Any, text: str) -> None:
    assert lengths.delay_text(length, "paid_at") == text


def test_what_is_accepted_as_a_length() -> None:
    span = UntilNewYear()
    assert as_length(span, "after") is span
    assert as_length(timedelta(1), "after") == timedelta(1)
    for value in (30, "30m", None, Working, OFFICE, lambda obj: timedelta(1)):
        with pytest.raises(InvalidDelay, match="after must be a timedelta, a span such as Working"):
            as_length(value, "after")
    with pytest.raises(InvalidDelay, match=r"leads to no datetime: hour must be in 0\.\.23"):
        as_length(relativedelta(hour=25), "after")


# Without USE_TZ


def test_without_use_tz_datetimes_are_naive_in_the_setting_time_zone(settings: Settings) -> None:
    settings.USE_TZ = False
    since = datetime(2026, 11, 5, 11)  # noqa: DTZ001 - 15:00 in Berlin
    working, end = Working(hours=4, calendar=OFFICE), datetime(2026, 11, 6, 7)  # noqa: DTZ001
    assert end_of(working, since, None) == end
    assert elapsed(working, since, end, None) == timedelta(hours=4)
    assert OwnTime(working).forward(since, timedelta(hours=4)) == end
    assert end_of(Wall(at="18:00", zone="Europe/Berlin"), since, None) == datetime(2026, 11, 5, 14)  # noqa: DTZ001
    assert end_of(Wall(at="18:00"), date(2026, 11, 5), None) == datetime(2026, 11, 5, 18)  # noqa: DTZ001
    with pytest.raises(InvalidDelay, match="The end of 'until New Year' is an aware datetime"):
        end_of(UntilNewYear(), since, None)


# What they refuse when they are declared, and what has no end when it is used


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
