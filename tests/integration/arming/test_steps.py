"""Declarations of steps, and when the next one is planned: as its round is armed, moved, held or continued.

`tests/integration/rounds` has what each event does to a planned step, and the oracle has their times.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import PolicyError, Wall, Working, WorkingHours, clock
from django_delayq.arming.holding import Facts, if_resumed
from django_delayq.arming.sync import sync_policy, sync_timeouts
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.invoices import ARMED, DAY, T0, Declare, at, days, dunning, note, planned, row_of, sent
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)
OFFICE = WorkingHours("UTC", {"mon-fri": "09:00-17:00"})


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    return dunning(declare)


def over(order: Order) -> str:
    return row_of(order).steps_over


def pass_steps(order: Order, step: str, over: str) -> None:
    """Let the steps `over` of the pending timeout have run, so that `step` is next."""
    run_at = {"firm:1": 14, "firm:2": 15, "firm:3": 16}[step] * DAY + T0
    Timeout.objects.filter(pk=row_of(order).pk).update(step=step, steps_over=over, run_at=run_at)


@pytest.mark.parametrize("grace", [12 * DAY, Wall(days=12)], ids=["timedelta", "span"])
def test_an_invoice_in_its_grace_is_not_too_old_to_be_armed(declare: Declare, grace: Any) -> None:
    policy = declare(Order, name="collect", after=14 * DAY, grace=grace, **ARMED)
    with at(25):
        saved = sent()
        Order.objects.bulk_create([Order(status="unpaid", created_at=T0), Order(status="unpaid", created_at=T0 - DAY)])
        done = sync_policy(policy, "default")
        assert done.armed == 2
    assert planned(saved) == ("", 26, 14)
    with at(26.01):
        Order.objects.bulk_create([Order(status="unpaid", created_at=T0)])
        assert sync_policy(policy, "default").armed == 0
        assert sent().timeouts.filter(policy=policy.label).exists(), "by CATCH_UP, which counts from the grace"
    with at(34):
        assert not sent().timeouts.filter(policy=policy.label).exists()


def test_bulk_arming_and_bulk_scheduling_plan_the_same(policy: Any, declare: Declare) -> None:
    by_hand = dunning(declare, name="by_hand", since=None, when=None)
    with at(12):
        orders = Order.objects.bulk_create(Order(status="unpaid", created_at=T0 + n * DAY) for n in (0, 1, 5))
        sync_timeouts(Order.objects.all())
        assert [planned(order) for order in orders] == [("firm:1", 14, 14), ("friendly", 12, 15), ("friendly", 16, 19)]
        assert [over(order) for order in orders] == ["friendly", "", ""]
        assert days(dq.get_deadline(orders[1], policy)) == 15
        assert dq.schedule_timeouts(orders, by_hand, days=2) == 3
        assert {(planned(order), over(order)) for order in orders} == {(("firm:1", 14, 14), "friendly")}
        assert dq.schedule_timeouts(orders, by_hand, days=5) == 3  # which replaces them
    assert {(planned(order), over(order)) for order in orders} == {(("friendly", 14, 17), "")}


@pytest.mark.parametrize(("more", "back", "expected"), [(7, 12, ("firm:1", 21, 21)), (0, 14.5, ("firm:2", 15, 14))])
def test_a_round_that_continues_has_the_steps_that_have_not_run(
    policy: Any, more: int, back: float, expected: tuple[str, float, float]
) -> None:
    with at(0):
        order = sent()
    pass_steps(order, "firm:1", "friendly")
    with at(12):
        if more:
            dq.extend_timeout(order, policy, days=more)
        order.status = "paid"
        order.save()
        assert row_of(order).state == "cancelled"
    with at(back):
        order.status = "unpaid"
        order.save()
    assert (row_of(order).state, planned(order)) == ("pending", expected)


def test_a_hold_within_the_grace_keeps_the_rest_of_the_grace(policy: Any) -> None:
    with at(0):
        order = sent()
    pass_steps(order, "firm:3", "friendly firm:2")
    with at(15.5):
        held = dq.hold_timeout(order, policy)
        assert held is not None
        assert held.remaining == -1.5 * DAY
        assert "0 s of its time is left" in dq.explain_timeout(order, policy).outlook
    with at(20):
        dq.resume_timeout(order, policy)
    assert planned(order) == ("firm:3", 20.5, 18.5)


@pytest.mark.parametrize(("day", "is_late"), [(13, False), (16.9, False), (17.1, True)])
def test_a_strict_guard_lets_people_pay_within_the_grace(policy: Any, day: float, is_late: bool) -> None:
    with at(0):
        order = sent()
    with at(day):
        if is_late:
            with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, policy, strict=True):
                pass
            return
        with dq.before_deadline(order, policy, strict=True):
            order.status = "paid"
            order.save()
    assert row_of(order).state == "cancelled"


# Steps at a fraction: of the time in which the deadline counts, without what the clock was stopped for


HOURS: dict[str, Any] = {
    "a constant": Working(hours=8, calendar=OFFICE),
    "by the object": Working(hours=8, calendar=lambda order: OFFICE if order.note else None),
    "a function": lambda order: Working(hours=8, calendar=OFFICE),
}


def moment(day: str, hour: float) -> datetime:
    """Return a time of a week in days after `T0`, which is a Tuesday."""
    return T0 + DAY * (5.5 + ("mon", "tue", "wed", "thu", "fri", "sat", "sun").index(day)) + timedelta(hours=hour)


def fractions(declare: Declare, after: Any, **options: Any) -> dq.TimeoutPolicy[Any]:
    policy = declare(Order, note, name="collect", after=after, **options)
    for fraction in (0.25, 0.5, 0.75):
        policy.step(fraction, name=f"at_{fraction:.0%}".removesuffix("%"))(note)
    return policy


@pytest.mark.parametrize("kind", HOURS)
def test_of_working_hours_it_is_the_fraction_of_open_time(declare: Declare, kind: str) -> None:
    policy, times = fractions(declare, HOURS[kind], **ARMED), []
    begin = moment("fri", 16)
    with clock.set_to(begin):
        order = Order.objects.create(status="unpaid", created_at=begin, note="by the office")
    for _ in range(4):
        row = row_of(order)
        times.append((row.step, row.run_at - moment("mon", 7 * 24)))
        with clock.set_to(row.run_at):
            fire_due(policy, order)
    assert times == [("at_25", 10 * HOUR), ("at_50", 12 * HOUR), ("at_75", 14 * HOUR), ("", 16 * HOUR)]


def hold(order: Order, policy: Any, begin: float, end: float) -> None:
    with at(begin):
        dq.hold_timeout(order, policy)
    row = row_of(order)
    with at(end):
        outlook = if_resumed(row, Facts([row], "default"))
        dq.resume_timeout(order, policy)
    assert outlook.run_at == row_of(order).run_at


def test_the_time_for_which_the_clock_was_stopped_does_not_count(declare: Declare) -> None:
    policy = fractions(declare, 8 * DAY, **ARMED)
    with at(0):
        order = sent()
    assert planned(order) == ("at_25", 2, 8)
    hold(order, policy, 1, 5)
    assert planned(order) == ("at_25", 6, 12)
    with at(6):
        fire_due(policy, order)
    assert planned(order) == ("at_50", 8, 12)
    hold(order, policy, 7, 8)
    assert planned(order) == ("at_50", 9, 13)
    with at(8):
        dq.extend_timeout(order, policy, days=8)
    assert planned(order) == ("at_50", 13, 21)


# Steps with `every=` and without `times=`: they repeat until the handler acts, and each move costs a few datetimes


class Counting:
    """Office hours, and how often they were asked for a datetime."""

    zone, next_open, nth_day, asked = "UTC", OFFICE.next_open, OFFICE.nth_day, 0

    def add(self, start: datetime, seconds: float) -> datetime:
        self.asked += 1
        return OFFICE.add(start, seconds)

    def between(self, a: datetime, b: datetime) -> float:
        self.asked += 1
        return OFFICE.between(a, b)


def test_a_move_computes_a_few_datetimes_however_often_a_step_repeats(declare: Declare) -> None:
    calendar, asked, order = Counting(), {}, Order.objects.create(status="x")
    policy = declare(Order, note, name="collect")
    policy.step(-60 * DAY, every=Working(hours=1, calendar=calendar), name="hourly")(note)
    with at(0):
        dq.schedule_timeout(order, policy, at=T0 + 60 * DAY)
    Timeout.objects.update(step="hourly:401", steps_over="hourly:400")
    moves: dict[str, Callable[[], object]] = {
        "extend": lambda: dq.extend_timeout(order, policy, days=1),
        "hold": lambda: dq.hold_timeout(order, policy),
        "resume": lambda: dq.resume_timeout(order, policy),
        "fire": lambda: fire_due(policy, order),
        "schedule late": lambda: dq.schedule_timeout(Order.objects.create(), policy, at=T0 + 60 * DAY),
    }
    for name, move in moves.items():
        calendar.asked = 0
        with at(50 if name in {"fire", "schedule late"} else 1):
            move()
        asked[name] = calendar.asked
    assert {name: count for name, count in asked.items() if count > 50} == {}


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"offset": 3}, note, "its offset must be a timedelta or span"),
    ({"offset": 3 * DAY}, note, "would never run: the handler of its policy acts at 3 d after its deadline"),
    ({"every": timedelta(0)}, note, "every must be a timedelta of a second or more"),
    ({"times": 3}, note, "times needs every="),
    ({"every": DAY, "times": 0}, note, "times must be an int from 1"),
    ({"name": "no name"}, note, "give name="),
    ({"name": "friendly"}, note, "another step has this name"),
    ({}, lambda obj: None, "is called with (obj, timeout), but takes"),
]


@pytest.mark.parametrize(("options", "handler", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_a_wrong_step_is_refused(declare: Declare, options: dict[str, Any], handler: Any, words: str) -> None:
    policy = dunning(declare)
    with pytest.raises(PolicyError) as raised:
        policy.step(**{"offset": -DAY, "name": "other", **options})(handler)
    assert words in str(raised.value)
    assert len(policy.steps) == 2


@pytest.mark.parametrize(
    ("options", "offset", "words"),
    [
        ({}, timedelta(0), "acts at its deadline, as it has no grace="),
        ({"batch": 5}, -DAY, "steps are called for one object alone"),
        ({"together": 5}, -DAY, "steps are called for one object alone"),
        ({"grace": DAY}, -DAY, "declare it right below"),
    ],
)
def test_a_policy_may_be_unable_to_have_a_step(declare: Declare, options: Any, offset: timedelta, words: str) -> None:
    policy = declare(Order, name="collect", after=DAY, **ARMED, **options)
    assert "right below" not in words or policy.has_plan  # it was used
    with pytest.raises(PolicyError, match=words):
        policy.step(offset, name="remind")(note)


@pytest.mark.parametrize("grace", [timedelta(0), -DAY, 3, "grace", Wall(days=-1)], ids=str)
def test_grace_is_longer_than_nothing(declare: Declare, grace: Any) -> None:
    with pytest.raises(PolicyError, match="grace must be a timedelta or span that is longer than nothing"):
        declare(Order, name="wrong", after=DAY, grace=grace)
