"""Plans of steps: when each runs, which are over, and which of those that were missed is the newest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_delayq import WorkingHours
from django_delayq.policy.steps import (
    HANDLER,
    Course,
    HasPlan,
    Planned,
    Step,
    newest_due,
    passed_before,
    step_of,
    with_over,
)
from django_delayq.times.lengths import OwnTime
from django_delayq.times.spans import Wall, Working
from tests.support.examples import examples

T0 = datetime(2030, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
many = examples(50)


def nothing(_obj: Any, _timeout: Any) -> None:
    """Do nothing."""


def step(name: str, offset: Any, **options: Any) -> Step:
    return Step(name=name, handler=nothing, offset=offset, **options)


def plan_of(
    steps: Iterable[Step], grace: Any, due_at: datetime, start: datetime = T0, **given: Any
) -> Iterator[Planned]:
    """Return the plan of a round with these steps; `given`: see `Course`."""
    policy: Any = HasPlan()
    policy.steps, policy.grace, policy.after, policy.needs_object = tuple(steps), grace, None, False
    policy.own_time = lambda obj: OwnTime(None)
    return HasPlan.plan(policy, Course(due_at, start, **given))


def days(plan: Iterable[Planned]) -> list[tuple[float, str]]:
    """Return a plan in days since `T0`."""
    return [((at - T0) / DAY, name) for at, name in plan]


DUNNING = [step("friendly", -3 * DAY), step("firm", timedelta(0), every=DAY, times=3)]


def test_a_plan_has_each_repetition_and_at_the_end_of_the_grace_the_handler() -> None:
    plan = plan_of(DUNNING, 3 * DAY, T0 + 14 * DAY)
    assert days(plan) == [(11, "friendly"), (14, "firm:1"), (15, "firm:2"), (16, "firm:3"), (17, HANDLER)]


def test_what_is_over_is_one_word_for_each_step() -> None:
    over = with_over("", ["friendly", "firm:1", "firm:3", "firm:2"])
    assert over == "friendly firm:3"
    plan = plan_of(DUNNING, 5 * DAY, T0 + 14 * DAY, over=over)
    assert [name for _, name in plan] == [HANDLER]
    plan = plan_of(DUNNING, 5 * DAY, T0 + 14 * DAY, over="firm:2")
    assert [name for _, name in plan] == ["friendly", "firm:3", HANDLER]
    assert step_of(DUNNING, "firm:2") is DUNNING[1]
    assert step_of(DUNNING, HANDLER) is None
    assert step_of(DUNNING, "gone") is None


@pytest.mark.parametrize(
    ("day", "following", "over"),
    [
        (14.5, Planned(T0 + 15 * DAY, "firm:2"), "friendly firm"),
        (15, Planned(T0 + 15 * DAY, "firm:2"), "friendly firm"),
        (30, Planned(T0 + 17 * DAY, HANDLER), "friendly firm:3"),
    ],
)
def test_a_round_that_is_armed_late_passes_what_was_before(day: float, following: Planned, over: str) -> None:
    now = T0 + day * DAY
    assert passed_before(now, plan_of(DUNNING, 3 * DAY, T0 + 14 * DAY, now=now), "") == over
    assert next(plan_of(DUNNING, 3 * DAY, T0 + 14 * DAY, over=over)) == following


def test_after_an_outage_the_newest_step_is_left() -> None:
    plan = plan_of(DUNNING, 3 * DAY, T0 + 14 * DAY, over="friendly")
    assert newest_due(plan, T0 + 15.5 * DAY) == (["firm:1"], Planned(T0 + 15 * DAY, "firm:2"))
    missed, newest = newest_due(plan_of(DUNNING, 3 * DAY, T0 + 14 * DAY), T0 + 20 * DAY)
    assert (missed, newest) == (["friendly", "firm:1", "firm:2", "firm:3"], Planned(T0 + 17 * DAY, HANDLER))
    assert newest_due(plan_of(DUNNING, 3 * DAY, T0 + 14 * DAY), T0) == ([], Planned(T0 + 11 * DAY, "friendly"))


OFFSETS = st.one_of(st.integers(-40, 40).map(lambda n: n * DAY / 4), st.floats(0.05, 0.95))
STEPS = st.lists(
    st.tuples(OFFSETS, st.one_of(st.none(), st.integers(1, 8)), st.one_of(st.none(), st.integers(1, 5))), max_size=5
).map(
    lambda found: [
        step(f"s{place}", offset, every=every and every * DAY / 4, times=times if every else None)
        for place, (offset, every, times) in enumerate(found)
    ]
)
GRACE = st.one_of(st.none(), st.integers(1, 20).map(lambda n: n * DAY / 4))
DUE = st.integers(1, 80).map(lambda n: T0 + n * DAY / 4)


@many
@given(STEPS, GRACE, DUE)
def test_a_plan_is_in_order_has_each_name_once_and_ends_with_the_handler(steps: Any, grace: Any, due_at: Any) -> None:
    plan = list(plan_of(steps, grace, due_at))
    assert plan[-1] == (due_at + (grace or timedelta(0)), HANDLER)
    assert [at for at, _ in plan] == sorted(at for at, _ in plan)
    *others, (acts_at, _) = plan
    assert all(at < acts_at for at, _ in others)
    assert len({name for _, name in plan}) == len(plan)


@many
@given(STEPS, GRACE, st.lists(st.tuples(DUE, st.integers(0, 12)), min_size=1, max_size=6))
def test_whatever_deadlines_a_round_gets_no_step_runs_twice_and_no_repetition_goes_back(
    steps: Any, grace: Any, moves: Any
) -> None:
    """Fire some steps under one deadline, then some under the next one."""
    over, ran = "", list[str]()
    for due_at, count in moves:
        for _ in range(count):
            following = next(plan_of(steps, grace, due_at, over=over))
            if following.name == HANDLER:
                break
            ran.append(following.name)
            over = with_over(over, [following.name])
    assert len(set(ran)) == len(ran)
    for each in steps:
        numbers = [int(name.partition(":")[2] or 1) for name in ran if name.partition(":")[0] == each.name]
        assert numbers == sorted(numbers)


@many
@given(STEPS, GRACE, DUE, st.integers(0, 400))
def test_what_was_missed_is_before_what_runs_and_nothing_due_is_after_it(
    steps: Any, grace: Any, due_at: Any, quarters: int
) -> None:
    plan, now = list(plan_of(steps, grace, due_at)), T0 + quarters * DAY / 4
    missed, current = newest_due(iter(plan), now)
    places = [name for _, name in plan]
    assert places[: len(missed) + 1] == [*missed, current.name]
    assert all(at > now for at, _ in plan[len(missed) + 1 :])


OFFICE = WorkingHours("UTC", {"mon-fri": ("09:00-12:00", "13:00-17:30")})
EVERY = [timedelta(hours=7), Working(hours=7, calendar=OFFICE), Working(days=1, calendar=OFFICE), Wall(days=1)]


@many
@given(STEPS, st.sampled_from(EVERY), GRACE, DUE, st.tuples(st.integers(0, 400), st.integers(0, 9)))
def test_what_is_computed_is_what_counting_from_the_first_one_leads_to(
    steps: Any, every: Any, grace: Any, due_at: Any, state: tuple[int, int]
) -> None:
    steps, now, ran = [*steps, step("often", -20 * DAY, every=every)], T0 + state[0] * DAY / 4, state[1]
    over = with_over("", [f"often:{ran}"] if ran else [])
    counted = [
        each
        for each in plan_of(steps, grace, due_at)
        if not each.name.startswith("often:") or int(each.name.removeprefix("often:")) > ran
    ]
    assert list(plan_of(steps, grace, due_at, over=over)) == counted
    computed = list(plan_of(steps, grace, due_at, over=over, now=now))
    passed = passed_before(now, computed, over)
    assert {*passed.split()} == {*passed_before(now, counted, over).split()}
    (missed, newest), (all_missed, current) = newest_due(iter(computed), now), newest_due(iter(counted), now)
    assert newest == current
    assert {*with_over(over, missed).split()} == {*with_over(over, all_missed).split()}
    assert missed == all_missed or len(missed) > 20


@pytest.mark.parametrize(
    ("given_step", "words"),
    [
        (step("a", -3 * DAY), "3 d before the deadline"),
        (step("a", timedelta(0), every=DAY, times=3), "at the deadline, every 1 d, 3 times"),
        (step("a", DAY, every=timedelta(hours=12)), "1 d after the deadline, every 12 h, until it acts"),
        (step("a", 0.75), "at 75% of the time"),
        (step("a", Wall(days=-3, at="09:00")), "3 days before the deadline, at 09:00"),
    ],
)
def test_a_step_says_when_it_runs(given_step: Step, words: str) -> None:
    assert str(given_step) == words
