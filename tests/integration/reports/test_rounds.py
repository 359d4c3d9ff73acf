"""What a round is in a report: one row that was settled, whatever was called before, and with which others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from django_delayq import TimeoutPolicy
from django_delayq.ledger.rollups import roll_up
from django_delayq.monitoring.reports import Report, policy_report
from django_delayq.monitoring.whatif import what_if
from django_delayq.testing import fire_due
from tests.integration.steps.days import DAY, T0, at, dunning, ran, row_of, sent
from tests.support.typed import Declare
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
MINUTE = timedelta(minutes=1)


def report_at(day: float, policy: TimeoutPolicy[Any], **options: Any) -> Report:
    """The report of all days, which is the same before and after workers have counted the days."""
    with at(day):
        before = policy_report(policy, first=T0.date(), **options)
        roll_up("default")
        assert policy_report(policy, first=T0.date(), **options) == before
    return before


def pay(order: Order) -> None:
    order.status = "paid"
    order.save()


def live(policy: TimeoutPolicy[Any], paid_on: dict[float, Order], until: int) -> None:
    """Fire due timeouts at noon of each day, and pay the orders on their days."""
    for day in sorted({*map(float, range(until + 1)), *paid_on}):
        with at(day):
            if day in paid_on:
                pay(paid_on[day])
            fire_due(policy)


def test_a_round_with_steps_is_one_round_that_ends_when_its_row_does(declare: Declare) -> None:
    policy = dunning(declare)
    with at(0):
        early, reminded, late, never = (sent() for _ in range(4))
    live(policy, {5.5: early, 12.5: reminded}, 13)
    assert ran() == ["friendly"] * 3
    assert report_at(13, policy).total.rounds == 2, "a step that has run ends no round"
    live(policy, {15.5: late}, 18)
    assert row_of(never).state == "fired"
    total = report_at(20, policy).total
    assert (total.rounds, total.in_time, total.ended_late, total.fired) == (4, 2, 1, 1)
    assert len(ran()) == 3 + 2 + 3 + 1, "the steps of four rounds, and one handler"


def test_what_if_compares_the_end_of_a_round_with_when_its_handler_acts_not_with_its_steps(declare: Declare) -> None:
    policy = dunning(declare)
    with at(0):
        orders = [sent() for _ in range(3)]
    live(policy, {4.5: orders[0], 12.5: orders[1]}, 18)
    with at(20):
        answers = {days: what_if(policy, days * DAY) for days in (14, 10, 9, 4, 1)}
    assert {days: (found.rounds, found.would_fire, found.ended_first) for days, found in answers.items()} == {
        14: (3, 1, 0),
        10: (3, 1, 0),  # the handler acts after 13 days
        9: (3, 2, 1),
        4: (3, 2, 1),
        1: (3, 3, 2),
    }
    assert all(found.is_exact for found in answers.values())
