"""A step with `every=` and without `times=`: it repeats until the handler acts, and each move costs a few datetimes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import Wall, Working, WorkingHours, operations
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.steps.days import DAY, T0, Declare, at, days, note, ran, row_of
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)
ALWAYS = WorkingHours("UTC", {"mon-sun": "00:00-24:00"})
LENGTHS: dict[str, tuple[Any, timedelta]] = {
    "real time": (HOUR, HOUR),
    "open time": (Working(hours=1, calendar=ALWAYS), HOUR),
    "days": (Wall(days=1, zone="UTC"), DAY),
}


class Counting:
    """Office hours, and how often they were asked."""

    zone = "UTC"

    def __init__(self) -> None:
        self.hours, self.asked = WorkingHours("UTC", {"mon-fri": "09:00-17:00"}), 0

    def add(self, start: datetime, seconds: float) -> datetime:
        self.asked += 1
        return self.hours.add(start, seconds)

    def between(self, a: datetime, b: datetime) -> float:
        self.asked += 1
        return self.hours.between(a, b)

    def next_open(self, moment: datetime) -> datetime:
        return self.hours.next_open(moment)

    def nth_day(self, day: date, n: int) -> date:
        return self.hours.nth_day(day, n)


def hourly(declare: Declare, every: Any) -> dq.TimeoutPolicy[Any]:
    """Declare a policy with a step that repeats from 60 days before the deadline on."""
    policy = declare(Order, note, name="collect")
    policy.step(-60 * DAY, every=every, name="hourly")(note)
    return policy


def scheduled(policy: dq.TimeoutPolicy[Any], on: float = 0) -> Order:
    """Schedule a timeout that is due on day 60."""
    with at(on):
        order = Order.objects.create(status="x")
        dq.schedule_timeout(order, policy, at=T0 + 60 * DAY)
    return order


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("over", [0, 59])
def test_it_repeats_until_the_handler_acts(declare: Declare, kind: str, over: int) -> None:
    """Hourly for 60 days is more than a thousand times."""
    every, length = LENGTHS[kind]
    policy = hourly(declare, every)
    order = scheduled(policy)
    number = over * DAY // length + 1
    Timeout.objects.update(step=f"hourly:{number}", steps_over=f"hourly:{number - 1}" * (number > 1))
    Timeout.objects.update(run_at=T0 + (number - 1) * length)
    with at(over):
        fire_due(policy, order)
    assert ran() == [f"hourly:{number}"]
    row, last = row_of(order), 60 * DAY // length
    expected = (f"hourly:{number + 1}", number * length / DAY) if number < last else ("", 60)
    assert (row.step, days(row.run_at)) == (expected[0], round(expected[1], 6))


@pytest.mark.parametrize("over", [0, 400])
def test_a_move_computes_a_few_datetimes_however_often_a_step_repeats(declare: Declare, over: int) -> None:
    calendar, asked = Counting(), {}
    policy = hourly(declare, Working(hours=1, calendar=calendar))
    order = scheduled(policy)
    asked["schedule"] = calendar.asked
    Timeout.objects.update(step=f"hourly:{over + 1}", steps_over=f"hourly:{over}" * bool(over))
    rows = dq.pending_timeouts(order, policy)
    moves: dict[str, Callable[[], object]] = {
        "extend": lambda: dq.extend_timeout(order, policy, days=1),
        "postpone": lambda: operations.postpone(rows, by="anna", days=1),
        "hold": lambda: dq.hold_timeout(order, policy),
        "resume": lambda: dq.resume_timeout(order, policy),
        "fire": lambda: fire_due(policy, order),
    }
    for name, move in moves.items():
        calendar.asked = 0
        with at(50 if name == "fire" else 1):
            move()
        asked[name] = calendar.asked
    calendar.asked = 0
    scheduled(policy, on=50)
    asked["schedule late"] = calendar.asked
    assert {name: count for name, count in asked.items() if count > 50} == {}
