"""A step at a fraction: of the time in which the deadline counts, without what the clock was stopped for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import Working, WorkingHours, clock, operations
from django_delayq.arming.holding import Facts, if_resumed
from django_delayq.testing import fire_due
from tests.integration.steps.days import ARMED, DAY, T0, Declare, at, days, note, planned, row_of, sent
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


def by_hand(order: Order, policy: Any, begin: Any, end: Any) -> None:
    with clock.set_to(begin):
        dq.hold_timeout(order, policy)
    with clock.set_to(end):
        dq.resume_timeout(order, policy)


def by_policy(order: Order, policy: Any, begin: Any, end: Any) -> None:
    with clock.set_to(begin):
        operations.hold(policy, by="anna")
    with clock.set_to(end):
        operations.resume(policy, by="anna")


def by_condition(order: Order, policy: Any, begin: Any, end: Any) -> None:
    for now, text in ((begin, "in talks"), (end, "")):
        with clock.set_to(now):
            order.note = text
            order.save()


STOPS: dict[str, Callable[..., None]] = {"by hand": by_hand, "of the policy": by_policy, "by condition": by_condition}


@pytest.mark.parametrize(
    ("stop", "is_armed"), [*((stop, True) for stop in STOPS), ("by hand", False), ("of the policy", False)]
)
def test_the_time_for_which_the_clock_was_stopped_does_not_count(declare: Declare, stop: str, is_armed: bool) -> None:
    policy = fractions(declare, 8 * DAY, **({**ARMED, "hold_when": Q(note="in talks")} if is_armed else {}))
    with at(0):
        order = sent()
        if not is_armed:
            dq.schedule_timeout(order, policy)
    assert planned(order) == ("at_25", 2, 8)
    STOPS[stop](order, policy, T0 + DAY, T0 + 5 * DAY)
    assert planned(order) == ("at_25", 6, 12)
    with at(6):
        fire_due(policy, order)
    assert planned(order) == ("at_50", 8, 12)
    STOPS[stop](order, policy, T0 + 7 * DAY, T0 + 8 * DAY)
    assert planned(order) == ("at_50", 9, 13)
    with at(8):
        dq.extend_timeout(order, policy, days=8)
    assert planned(order) == ("at_50", 13, 21)
    with at(14):
        fire_due(policy, order)
    assert planned(order) == ("at_75", 17, 21)


def test_nor_the_open_time_for_which_it_was_stopped(declare: Declare) -> None:
    policy = fractions(declare, HOURS["a constant"], **ARMED)
    with clock.set_to(moment("mon", 9)):
        order = Order.objects.create(status="unpaid", created_at=moment("mon", 9))
    by_hand(order, policy, moment("mon", 10), moment("tue", 12))
    row = row_of(order)
    assert (row.step, row.run_at, row.due_at) == ("at_25", moment("tue", 13), moment("wed", 11))
    with clock.set_to(moment("tue", 13)):
        fire_due(policy, order)
    assert row_of(order).run_at == moment("tue", 15)


def test_the_outlook_of_a_stopped_clock_is_what_follows(declare: Declare) -> None:
    policy = fractions(declare, 8 * DAY)
    with at(0):
        order = sent()
        dq.schedule_timeout(order, policy)
    with at(1):
        dq.hold_timeout(order, policy)
    row = row_of(order)
    with at(5):
        assert days(if_resumed(row, Facts([row], "default")).run_at) == 6
