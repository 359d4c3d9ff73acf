"""What a stop does to a deadline, for each kind of span: over nights, weekends, holidays, and changes of the clocks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from hypothesis import assume, given
from hypothesis import strategies as st

from django_delayq.policy.steps import Course, Step, plan_of
from django_delayq.rounds.memory import MAX_EVENTS, stops_of, with_stop
from django_delayq.times.calendars import WorkingHours
from django_delayq.times.lengths import OwnTime, end_of
from django_delayq.times.spans import Length, Wall, Working
from tests.support.examples import examples
from tests.unit.minutes import Case, Count, cases

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
FIRST = datetime(2026, 3, 23, tzinfo=UTC)  # a Monday; the clocks of Europe change on the Sunday after
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe")
WEEKS: list[dict[str, Any]] = [
    {"mon-fri": "09:00-17:00"},
    {"mon-fri": "13:00-17:00"},
    {"mon-fri": ("09:00-12:30", "13:00-17:00"), "sat": "10:00-14:00"},
    {"mon-sun": "22:00-06:00"},
]
HOLIDAYS: list[set[date]] = [{FIRST.date() + DAY * day for day in days} for days in ((), (1, 2, 8), (4, 7, 9, 10))]
CALENDARS = {zone: [WorkingHours(zone, week, days) for week in WEEKS for days in HOLIDAYS] for zone in ZONES}
LENGTHS: list[Callable[[WorkingHours], Length]] = [
    lambda calendar: Working(hours=8, calendar=calendar),
    lambda calendar: Working(minutes=95, calendar=calendar),
    lambda calendar: Working(days=3, calendar=calendar),
    lambda calendar: Working(days=2, at="09:00", calendar=calendar),
    lambda calendar: Working(days=1, at="18:00", calendar=calendar),
    lambda calendar: Wall(days=2, at="09:00", zone="Europe/Berlin"),
    lambda calendar: timedelta(hours=30),
]


class Facts(NamedTuple):
    """A round, with what happens to it."""

    length: Callable[[WorkingHours], Length]
    calendars: tuple[WorkingHours, WorkingHours]
    """The first one, and the one to which it changes."""
    since: datetime
    stops: list[tuple[datetime, datetime]]

    def time(self, number: int = 0) -> OwnTime:
        return OwnTime(self.length(self.calendars[number]))

    def due_at(self, number: int = 0) -> datetime:
        due_at = end_of(self.length(self.calendars[number]), self.since, None)
        assert due_at is not None
        return due_at


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    calendars = st.sampled_from(CALENDARS[draw(st.sampled_from(ZONES))])
    moments = draw(st.lists(st.integers(0, 10 * 24 * 12), min_size=2, max_size=5))
    times = [FIRST + 5 * MINUTE * number for number in sorted(moments)]
    stops = [(begin, end) for number, (begin, end) in enumerate(pairwise(times)) if number % 2 == 0 and begin < end]
    since = FIRST + MINUTE * draw(st.integers(0, 8 * 24 * 60))
    return Facts(draw(st.sampled_from(LENGTHS)), (draw(calendars), draw(calendars)), since, stops)


@examples(150)
@given(facts())
def test_a_stop_moves_a_deadline_by_the_time_that_was_stopped(case: Facts) -> None:
    time, due_at = case.time(), case.due_at()
    for begin, end in case.stops:
        moved, stopped = time.after_stop(due_at, begin, end), time.elapsed(begin, end)
        assert moved >= due_at
        if not stopped:
            assert moved == due_at
        elif due_at >= begin:
            assert time.elapsed(due_at, moved) == stopped
            assert moved >= end
        else:
            assert moved == end
        graced = time._replace(has_grace=True).after_stop(due_at, begin, end)
        assert time.elapsed(due_at, graced) == stopped
        due_at = moved


@examples(100)
@given(facts(), st.integers(1, 600))
def test_every_order_of_the_same_facts_leads_to_the_same_deadline(case: Facts, minutes: int) -> None:
    def play(steps: tuple[Any, ...]) -> datetime:
        """Do as the ledger does: move at each resume, and compute again when the calendar changes."""
        number, due_at, stops = 0, case.due_at(), None
        for step in steps:
            if step == "calendar":
                number = 1
                due_at = case.time(number).after_stops(case.due_at(number), stops_of(stops))
            elif step == "extension":
                due_at = case.time(number).forward(due_at, minutes * MINUTE)
            else:
                assume(due_at >= step[0])  # else it would have fired
                due_at, stops = case.time(number).after_stop(due_at, *step), with_stop(stops, *step)
        return due_at

    orders = [each for each in permutations([*case.stops, "calendar"]) if _in_order(each)]
    assert len({play(order) for order in orders}) == 1
    orders = [("calendar", *each) for each in permutations([*case.stops, "extension"]) if _in_order(each)]
    assert len({play(order) for order in orders}) == 1


def _in_order(steps: tuple[Any, ...]) -> bool:
    """Return whether the stops come one after the other."""
    stops = [step for step in steps if isinstance(step, tuple)]
    return stops == sorted(stops)


class Round(NamedTuple):
    """A round by the calendar of a case, with its stops, and its minutes in the order of the clock."""

    course: Course
    minutes: list[bool]
    """Whether each minute from its beginning on counts: it is open, and its clock is not stopped."""

    def __repr__(self) -> str:
        return repr(self.course)

    def counted(self, until: datetime) -> timedelta:
        return MINUTE * sum(self.minutes[: max((until - self.course.start) // MINUTE, 0)])


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    case: Case = draw(cases())
    count, since = Count(case), case.start.replace(second=0, microsecond=0)
    moments = sorted(draw(st.lists(st.integers(0, 5 * 24 * 12), min_size=2, max_size=7)))
    times = [since + 5 * MINUTE * number for number in moments]
    stops = [(begin, end) for number, (begin, end) in enumerate(pairwise(times)) if number % 2 == 0 and begin < end]
    length = Working(minutes=draw(st.integers(1, 1_500)), calendar=case.calendar)
    time, due_at = OwnTime(length), end_of(length, since, None)
    assume(due_at is not None)
    due_at = time.after_stops(due_at, stops) if due_at else since
    first = (since - count.first) // MINUTE
    assume((due_at - count.first) // MINUTE < len(count.is_open))
    minutes = [
        is_open and not any(begin <= since + MINUTE * number < end for begin, end in stops)
        for number, is_open in enumerate(count.is_open[first:])
    ]
    return Round(Course(due_at, since, stops=stops, time=time), minutes)


@examples(50)
@given(rounds(), st.integers(0, 9 * 24 * 60), st.floats(0.05, 0.95))
def test_what_is_used_is_what_counting_each_minute_leads_to(case: Round, minute: int, fraction: float) -> None:
    course, now = case.course, case.course.start + MINUTE * min(minute, len(case.minutes) - 1)
    time, total = course.total
    assert total == case.counted(course.due_at)
    assert course.used(time, now) == case.counted(now)
    # A step at a fraction runs when that share is reached, and not before.
    step = Step(name="part", handler=print, offset=fraction)
    at = next(plan_of([step], course.due_at + DAY, course)).at
    assert abs(course.used(time, at) - total * fraction) < timedelta(milliseconds=1)
    is_before = course.used(time, at - timedelta(seconds=1)) < total * fraction
    assert is_before or at in {end for _, end in course.stops}  # which began at that time
    assert case.counted(at) <= total * fraction + timedelta(milliseconds=1) <= case.counted(at + MINUTE) + MINUTE / 30


def test_many_stops_are_kept_as_few_and_lead_to_no_earlier_deadline() -> None:
    stops, due_at, time = None, FIRST + 100 * DAY, OwnTime(None)
    spans = [(FIRST + HOUR * number, FIRST + HOUR * number + MINUTE * (number % 50)) for number in range(1, 200)]
    for begin, end in spans:
        stops = with_stop(stops, begin, end)
    kept = stops_of(stops)
    assert len(kept) == MAX_EVENTS
    assert (kept[0][0], kept[-1][1]) == (spans[0][0], spans[-1][1])
    assert all(end < begin for (_, end), (begin, _) in pairwise(kept))
    assert time.after_stops(due_at, kept) >= time.after_stops(due_at, spans)
