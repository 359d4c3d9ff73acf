"""A step at a fraction of the time in which the deadline counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import Working, WorkingHours, clock
from django_delayq.testing import fire_due
from tests.integration.steps.days import ARMED, DAY, Declare, note, row_of
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
OFFICE = WorkingHours("UTC", {"mon-fri": "09:00-17:00"})
HOURS: dict[str, Any] = {
    "a constant": Working(hours=8, calendar=OFFICE),
    "by the object": Working(hours=8, calendar=lambda order: OFFICE if order.note else None),
    "a function": lambda order: Working(hours=8, calendar=OFFICE),
}


def moment(day: str, hour: float) -> datetime:
    """Return a time of a week; 7 January 2030 is a Monday."""
    first = datetime(2030, 1, 7, tzinfo=UTC)
    return first + DAY * ("mon", "tue", "wed", "thu", "fri", "sat", "sun").index(day) + timedelta(hours=hour)


def fractions(declare: Declare, after: Any, **options: Any) -> dq.TimeoutPolicy[Any]:
    policy = declare(Order, note, name="collect", after=after, **options)
    for fraction in (0.25, 0.5, 0.75):
        policy.step(fraction, name=f"at_{fraction:.0%}".removesuffix("%"))(note)
    return policy


@pytest.mark.parametrize("kind", HOURS)
def test_of_working_hours_it_is_the_fraction_of_open_time(declare: Declare, kind: str) -> None:
    policy = fractions(declare, HOURS[kind], **ARMED)
    begin = moment("fri", 16)
    with clock.set_to(begin):
        order = Order.objects.create(status="unpaid", created_at=begin, note="by the office")
    times = []
    for _ in range(4):
        row = row_of(order)
        times.append((row.step, row.run_at - moment("mon", 7 * 24)))
        with clock.set_to(row.run_at):
            fire_due(policy, order)
    hours = timedelta(hours=1)
    assert times == [("at_25", 10 * hours), ("at_50", 12 * hours), ("at_75", 14 * hours), ("", 16 * hours)]


def test_without_open_time_it_is_the_fraction_of_all_time(declare: Declare) -> None:
    policy = declare(Order, note, name="collect", after=HOURS["a constant"])
    policy.step(0.5, name="half")(note)
    with clock.set_to(moment("sat", 12)):
        order = Order.objects.create(status="x")
        row = dq.schedule_timeout(order, policy, hours=10)
    assert (row.step, row.run_at) == ("half", moment("sat", 17))
