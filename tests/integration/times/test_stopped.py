"""A stop moves a deadline by the open time that was stopped: by hand, by condition, by policy, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import Working, clock, operations
from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.times.conftest import HOUR, Declare, at, only_row, opened
from tests.testapp.desk import Team, Ticket

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("controls_are_read_again"),
]
OFFICE = dq.WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"})
WAITING: dict[str, Any] = {"when": ~Q(status="closed"), "hold_when": Q(status="waiting"), "since": "opened_at"}
BY = "test:operator"


def week(text: str) -> datetime:
    """Return a time of the first week of June, or after a `+` of the week after it."""
    return at(text.lstrip("+"), "2026-06-08" if text.startswith("+") else "2026-06-01")


def save(ticket: Ticket, **values: Any) -> Ticket:
    vars(ticket).update(values)
    ticket.save()
    return ticket


@pytest.fixture
def way(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return how a clock is stopped, and how it runs again."""
    ways: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "hand": (dq.hold_timeout, dq.resume_timeout),
        "condition": (lambda ticket, _: save(ticket, status="waiting"), lambda ticket, _: save(ticket, status="open")),
        "policy": (
            lambda _, policy: operations.hold(policy, by=BY),
            lambda _, policy: operations.resume(policy, by=BY),
        ),
        "leaving": (
            lambda ticket, _: [save(ticket, status=each) for each in ("waiting", "closed")],
            lambda ticket, _: save(ticket, status="open"),
        ),
    }
    return ways[request.param]


WAYS = pytest.mark.parametrize("way", ["hand", "condition", "policy", "leaving"], indirect=True)
STOPS = [
    (Working(days=3, at="09:00", calendar=OFFICE), "Thu 18:00", "Fri 08:00", "+Mon 09:00", "+Mon 09:00"),
    (Working(days=3, at="09:00", calendar=OFFICE), "Fri 18:00", "Sun 12:00", "+Mon 09:00", "+Mon 09:00"),
    (Working(days=3, at="09:00", calendar=OFFICE), "Fri 16:00", "Sun 12:00", "+Mon 09:00", "+Mon 10:00"),
    (Working(days=1, at="18:00", calendar=OFFICE), "Thu 17:10", "Thu 17:11", "Thu 18:00", "Thu 18:00"),
    (Working(days=1, at="18:00", calendar=OFFICE), "Thu 17:30", "Fri 08:00", "Thu 18:00", "Thu 18:00"),
    (Working(hours=8, calendar=OFFICE), "Wed 16:00", "Fri 12:00", "Thu 10:00", "Fri 14:00"),
]


@WAYS
@pytest.mark.parametrize("stop", STOPS, ids=[str(number) for number in range(len(STOPS))])
def test_a_stop_moves_a_deadline_by_the_open_time_of_the_stop(declare: Declare, way: Any, stop: Any) -> None:
    after, begin, end, due, moved = stop
    policy = declare(Ticket, name="answer", after=after, **WAITING)
    with clock.set_to(week("Wed 10:00")):
        ticket = opened(None, "Wed 10:00")
    assert only_row().due_at == week(due)
    with clock.set_to(week(begin)):
        way[0](ticket, policy)
    with clock.set_to(week(end)):
        way[1](ticket, policy)
        assert int(fire_due(policy)) == (week(moved) <= week(end))
    assert Timeout.objects.latest("pk").due_at == week(moved)


@WAYS
def test_a_deadline_that_was_promised_by_hand_is_not_moved_by_closed_time(declare: Declare, way: Any) -> None:
    policy = declare(Ticket, name="answer", after=Working(hours=8, calendar=OFFICE), **WAITING)
    ticket = opened(None, "Mon 10:00")
    dq.reschedule_timeout(ticket, policy, at=week("Sun 20:00"))
    if way[0] is dq.hold_timeout:
        with clock.set_to(week("Sat 12:00")):
            held = dq.hold_timeout(ticket, policy)
        assert held is not None
        assert held.remaining == timedelta(0), "no open hour is left until Sunday"
        with clock.set_to(week("Sat 12:30")):
            dq.hold_timeout(ticket, policy, until=week("Sat 13:00"))
        with clock.set_to(week("Sun 19:00")):
            assert not fire_due(policy), "which ends its hold"
    else:
        for what, moment in zip(way, ("Sat 12:00", "Sat 13:00"), strict=True):
            with clock.set_to(week(moment)):
                what(ticket, policy)
    assert dq.get_deadline(ticket, policy) == week("Sun 20:00")


SHORTER, LONGER = ("09:00-17:00", "13:00-17:00", "Fri 14:00"), ("13:00-17:00", "09:00-17:00", "Thu 11:00")


@pytest.mark.parametrize(("order", "change"), [("waiting", SHORTER), ("waiting", LONGER), ("after", SHORTER)])
@WAYS
def test_another_calendar_leads_to_the_same_deadline_whenever_it_comes(
    declare: Declare, way: Any, order: str, change: tuple[str, str, str]
) -> None:
    *hours, due = change
    policy = declare(Ticket, name="answer", after=Working(hours=8, calendar="team__calendar"), **WAITING)
    first, other = (Team.objects.create(zone="Europe/Berlin", hours=each) for each in hours)
    ticket = opened(first, "Mon 10:00")

    def move(when: str) -> None:
        if when == order:
            save(ticket, team_id=other.pk)

    with clock.set_to(week("Mon 14:00")):
        way[0](ticket, policy)
    with clock.set_to(week("Tue 11:00")):
        move("waiting")
    with clock.set_to(week("Wed 15:00")):
        way[1](ticket, policy)
        move("after")
    assert dq.pending_timeouts(ticket, policy).get().due_at == week(due)


def test_a_night_that_did_not_count_counts_in_a_calendar_that_is_open_then(declare: Declare) -> None:
    policy = declare(Ticket, name="answer", after=Working(hours=12, calendar="team__calendar"), **WAITING)
    day, night = (Team.objects.create(zone="Europe/Berlin", hours=each) for each in ("09:00-17:00", "00:00-23:00"))
    ticket = opened(day, "Mon 10:00")
    with clock.set_to(week("Mon 18:00")):
        operations.hold(policy, by=BY)
    with clock.set_to(week("Tue 08:00")):
        operations.resume(policy, by=BY)
        assert dq.get_deadline(ticket, policy) == week("Tue 14:00")
        save(ticket, team_id=night.pk)
    assert dq.get_deadline(ticket, policy) == week("Tue 12:00"), "22:00, and 13 hours of the night"


@pytest.mark.parametrize("begins", ["before", "after", "at work"])
def test_a_hold_whose_end_no_worker_has_noticed_ends_before_a_condition_begins(declare: Declare, begins: str) -> None:
    policy = declare(Ticket, name="answer", after=timedelta(hours=8), **WAITING)
    ticket = opened(None, "Mon 10:00")
    with clock.set_to(week("Mon 11:00")):
        dq.hold_timeout(ticket, policy, until=week("Mon 12:00"))
        if begins == "before":
            save(ticket, status="waiting")
    with clock.set_to(week("Mon 15:00")):
        if begins == "at work":
            end_holds_by_hand("default")
        save(ticket, status="waiting")
        ticket.save()
    with clock.set_to(week("Mon 16:00")):
        end_holds_by_hand("default")
        row = only_row()
        assert (row.state, row.held_by_hand) == ("held", False)
        assert row.remaining == (7 if begins == "before" else 4) * HOUR
        save(ticket, status="open")
    assert dq.get_deadline(ticket, policy) == week("Mon 23:00" if begins == "before" else "Mon 20:00")
