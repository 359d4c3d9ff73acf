"""Working hours: examples, the same answers as a count minute by minute, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import holidays
import pytest
from dateutil import tz
from hypothesis import given
from hypothesis import strategies as st

from django_delayq.times.calendars import WorkingHours, instant_of
from tests.support.examples import examples
from tests.unit.minutes import DAY, Case, Count, around, cases

BERLIN = ZoneInfo("Europe/Berlin")
HOUR = 3600
GERMANY = holidays.country_holidays("DE")
OFFICE = WorkingHours("Europe/Berlin", {"mon-fri": ("09:00-12:30", "13:00-17:00")}, holidays=GERMANY)
SPECIAL = {
    date(2026, 12, 24): "09:00-13:00",
    date(2026, 12, 26): ("10:00-12:00", "13:00-14:00"),
    date(2026, 12, 28): None,
}


def berlin(*parts: int, fold: int = 0) -> datetime:
    return datetime(*parts, tzinfo=BERLIN, fold=fold)  # type: ignore[arg-type, misc]


def minutes_of(moment: datetime) -> str:
    """Return a result as people in Berlin read it."""
    assert moment.tzinfo is UTC
    return f"{moment.astimezone(BERLIN):%a %d %b %H:%M}"


# Examples


def test_the_text_groups_days_with_the_same_hours() -> None:
    assert str(OFFICE) == OFFICE.text == "mon-fri 09:00-12:30, 13:00-17:00, Europe/Berlin"
    both = WorkingHours("Asia/Tokyo", {"mon-wed": "09:00-17:00", "fri": "22:00-06:00", "sun": "00:00-24:00"})
    assert both.text == "mon-wed 09:00-17:00; fri 22:00-06:00; sun 00:00-24:00, Asia/Tokyo"
    assert repr(both) == f"<WorkingHours {both.text}>"


def test_holidays_and_special_days_are_asked_each_time() -> None:
    free, special = list[date](), dict[date, str | None]()
    calendar = WorkingHours("UTC", {"mon-fri": "09:00-17:00"}, free, special)
    thursday, wednesday = datetime(2026, 11, 5, tzinfo=UTC), date(2026, 11, 4)
    assert calendar.next_open(thursday).day == 5
    free.append(date(2026, 11, 5))
    assert calendar.next_open(thursday).day == 6
    assert calendar.nth_day(wednesday, 1) == date(2026, 11, 6)
    special[date(2026, 11, 5)] = "11:00-12:00"
    assert calendar.next_open(thursday) == datetime(2026, 11, 5, 11, tzinfo=UTC)
    assert calendar.nth_day(wednesday, 1) == date(2026, 11, 5)


@pytest.mark.parametrize("special", [SPECIAL, SPECIAL.__getitem__])
def test_special_days_have_hours_of_their_own_also_on_a_weekend_and_a_holiday(special: Any) -> None:
    office = WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"}, holidays=GERMANY, special=special)
    ends = [minutes_of(office.add(berlin(2026, 12, 24, 9), hours * HOUR)) for hours in (4, 5, 7, 8)]
    assert ends == ["Thu 24 Dec 13:00", "Sat 26 Dec 11:00", "Sat 26 Dec 14:00", "Tue 29 Dec 10:00"]
    assert [office.nth_day(date(2026, 12, 23), n).day for n in (1, 2, 3)] == [24, 26, 29]
    assert office.between(berlin(2026, 12, 24, 9), berlin(2026, 12, 29, 9)) == 7 * HOUR


def test_time_that_is_open_by_two_windows_counts_once() -> None:
    special = {date(2026, 11, 5): "20:00-10:00"}
    calendar = WorkingHours("UTC", {"mon-fri": ("07:00-08:00", "09:00-12:00")}, special=special)
    begin, end = datetime(2026, 11, 5, 20, tzinfo=UTC), datetime(2026, 11, 6, 12, tzinfo=UTC)
    assert calendar.between(begin, end) == 16 * HOUR
    assert (calendar.add(begin, 16 * HOUR), calendar.add(end, -16 * HOUR)) == (end, begin)


def test_special_days_of_a_callable_are_checked_when_they_are_asked() -> None:
    answers: Iterator[Any] = iter([9, "9-12", ["10:00-12:00", "11:00-13:00"]])
    calendar = WorkingHours("UTC", {"mon-fri": "09:00-17:00"}, special=lambda day: next(answers))
    expected = [(TypeError, "11-04 must have windows"), (ValueError, "not a window"), (ValueError, "overlap")]
    for error, message in expected:
        with pytest.raises(error, match=message):
            calendar.next_open(datetime(2026, 11, 5, tzinfo=UTC))


# The same answers as a count minute by minute


@examples(60)
@given(case=cases(), seconds=st.integers(-250_000, 250_000), unit=st.sampled_from((1, 300)))
def test_a_calendar_answers_as_a_count_minute_by_minute(case: Case, seconds: int, unit: int) -> None:
    """What the count does not reach, in a calendar with few hours, is not compared."""
    calendar, count, seconds = case.calendar, Count(case), seconds // unit * unit
    for found, expected in (
        (calendar.add(case.start, seconds), count.add(case.start, seconds)),
        (calendar.next_open(case.start), count.add(case.start, 0)),
    ):
        assert expected is None or found == expected
        assert found.tzinfo is UTC
    end = case.start + timedelta(seconds=seconds)
    assert calendar.between(case.start, end) == count.between(case.start, end)


@examples(30)
@given(case=cases(), n=st.integers(-4, 4), offset=st.integers(-3, 3))
def test_working_days_are_those_on_which_a_window_begins(case: Case, n: int, offset: int) -> None:
    day = case.middle.date() + offset * DAY
    working = [other for other in around(case) if case.begins_on(other)]
    before, after = [other for other in working if other < day], [other for other in working if other > day]
    chosen = before[::-1] if n < 0 else after if n else [*([day] if day in working else []), *after]
    index = max(abs(n) - 1, 0)
    if index < len(chosen):
        assert case.calendar.nth_day(day, n) == chosen[index]


@pytest.mark.parametrize(
    ("wall", "instant"),
    [
        ("2026-03-29 02:30:15.000007", "2026-03-29 01:00"),  # the first one after the gap
        ("2026-10-25 02:00", "2026-10-25 01:00"),  # the later one
    ],
)
def test_the_instant_of_a_wall_time_in_berlin(wall: str, instant: str) -> None:
    assert instant_of(datetime.fromisoformat(wall), BERLIN) == datetime.fromisoformat(f"{instant}+00:00")


# Never open


# Errors


@pytest.mark.parametrize(
    ("hours", "message"),
    [
        ({}, "hours is empty"),
        ({"mon": ()}, "no windows for 'mon'"),
        ({"mon": "9-17"}, "'9-17' is not a window"),
        ({"mon": "09:00-25:00"}, "is not a window"),
        ({"mon": "09:00-09:00"}, "is empty. For a whole day"),
        ({"monday": "09:00-17:00"}, "'monday' in hours is not a day. Did you mean 'mon'?"),
        ({"mon-": "09:00-17:00"}, "'' in hours is not a day. Use mon to sun."),
        ({"mon-wed-fri": "09:00-17:00"}, "is not a range of days"),
        ({"mon-wed": "09:00-17:00", "tue": "09:00-12:00"}, "hours has tue twice"),
        ({"mon": ("09:00-13:00", "12:00-17:00")}, "09:00-13:00 of mon and 12:00-17:00 overlap"),
        ({"sun": "22:00-06:00", "mon": "05:00-12:00"}, "22:00-06:00 of sun and 05:00-12:00 overlap"),
    ],
)
def test_hours_that_make_no_sense_are_refused(hours: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="(?i)" + message.replace("?", r"\?").replace(".", r"\.")):
        WorkingHours("UTC", hours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("UTC", "09:00-17:00"), "must be a mapping"),
        (("UTC", {0: "09:00-17:00"}), "must map days to windows"),
        (("UTC", {"mon": 9}), "mon must have windows"),
        (("UTC", {"mon": [(9, 17)]}), "A window is a string"),
        ((2, {"mon": "09:00-17:00"}), "A zone is an IANA name"),
        ((tz.gettz("Europe/Berlin"), {"mon": "09:00-17:00"}), "or a zoneinfo.ZoneInfo"),
        (("UTC", {"mon": "09:00-17:00"}, "2026-01-01"), "holidays must be a container of dates"),
        (("UTC", {"mon": "09:00-17:00"}, {datetime(2026, 1, 1, tzinfo=UTC)}), "holidays must contain dates"),
        (("UTC", {"mon": "09:00-17:00"}, (), "2026-01-01"), "special must be a mapping of dates"),
        (("UTC", {"mon": "09:00-17:00"}, (), {"2026-01-01": None}), "special must contain dates, not '2026"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        WorkingHours(*arguments)


@pytest.mark.parametrize("zone", ["Europe/Berln", "Europe", "../etc/passwd", "\0"])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="is not a time zone. Use an IANA name"):
        WorkingHours(zone, {"mon": "09:00-17:00"})


def test_a_naive_datetime_is_refused() -> None:
    with pytest.raises(ValueError, match="is naive: add a time zone"):
        OFFICE.next_open(datetime(2026, 1, 1))  # noqa: DTZ001 - naive on purpose
