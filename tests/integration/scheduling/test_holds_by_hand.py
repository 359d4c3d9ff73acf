"""`hold_timeout` and `resume_timeout`: what they do, and what people see of it."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.template import Context, Template
from django.test import Client
from django.urls import reverse

import django_delayq as dq
from django_delayq import operations
from django_delayq.contrib.countdown import countdown_of, pending_countdowns
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.hours import HOUR, T0, Declare, again, at, hours
from tests.support.seen import heard
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
BY = "admin:alice"


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """A policy that is scheduled by hand."""
    return declare(Order, name="by_hand", max_extensions=1)


@pytest.fixture
def row(policy: dq.TimeoutPolicy[Any], order: Order) -> Timeout:
    """A timeout that is due four hours after `T0`, and was held after one."""
    with at(0):
        dq.schedule_timeout(order, policy, hours=4)
    with at(1):
        held = dq.hold_timeout(order, policy, reason="in talks")
    assert held is not None
    return held


def test_a_held_timeout_keeps_the_rest_of_its_time(row: Timeout, order: Order, policy: Any) -> None:
    for found in (row, again(row)):
        assert (found.state, found.remaining, found.held_by_hand) == ("held", 3 * HOUR, True)
        assert (hours(found.due_at), hours(found.held_at), found.is_settled, found.is_waiting) == (4, 1, False, True)
    with at(100):
        assert not fire_due(raises=False)
        resumed = dq.resume_timeout(order, policy, reason="they agreed")
    assert resumed is not None
    for found in (resumed, again(row)):
        assert (found.state, found.remaining, found.held_by_hand, found.held_at) == ("pending", None, False, None)
        assert hours(found.due_at) == hours(found.run_at) == 103
        assert hours(found.restarted_at) == hours(found.ready_at) == 100
    told = [(event["what"], event["by"], event["reason"]) for event in resumed.history]
    assert told == [("held", "hand", "in talks"), ("resumed", "hand", "they agreed")]
    with at(103):
        assert len(fire_due().fired) == 1
    assert again(row).lateness() == 0


@pytest.mark.parametrize("keep_deadline", [False, True])
def test_a_retry_and_a_snooze_wait_as_long_as_before(declare: Declare, order: Order, keep_deadline: bool) -> None:
    def fail(obj: Order, timeout: Timeout) -> None:
        raise dq.Snooze(hours=5)

    policy = declare(Order, fail, name="snoozing")
    with at(0):
        row = dq.schedule_timeout(order, policy, hours=1)
    with at(1):
        fire_due()
    with at(2):
        dq.hold_timeout(row, keep_deadline=keep_deadline)
    with at(5):
        assert operations.resume_timeout(row, by=BY).due_at_once == 0
    assert hours(again(row).run_at) == (6 if keep_deadline else 9)


def test_signals_report_both_also_of_the_async_twins(row: Timeout, order: Order, policy: Any) -> None:
    with heard("held", "resumed") as got:
        dq.resume_timeout(order, policy)
        dq.hold_timeout(order, policy)
        assert async_to_sync(dq.aresume_timeout)(order, policy) == row
        async_to_sync(dq.ahold_timeout)(order, policy)
        operations.resume_timeout(row, by=BY)
        operations.hold_timeout(row, by=BY)
        operations.hold_timeout(Timeout.objects.filter(pk=0), by=BY)
    assert [(name, timeout.state) for name, timeout in got] == [("resumed", "pending"), ("held", "held")] * 3


# What people see of a timeout whose clock is stopped, or which is paused.


@pytest.fixture
def shown_row(order: Order) -> Timeout:
    """A timeout with 2 h 10 min left."""
    with at(0):
        dq.schedule_timeout(order, "remind", hours=3, minutes=10)
    with at(1):
        held = dq.hold_timeout(order, "remind", reason="in talks", until=T0 + 24 * HOUR)
    assert held is not None
    return held


def test_the_story_of_a_stopped_clock(shown_row: Timeout, order: Order) -> None:
    story = dq.explain_timeout(order, "remind")
    assert "its clock is stopped, until 2030-01-02 09:00:00.000, 2 h 10 min left, by hand (in talks)" in str(story)
    assert story.outlook == "Its clock is stopped by hand until 2030-01-02 09:00:00; 2 h 10 min of its time is left."
    with at(2):
        dq.resume_timeout(order, "remind")
    assert "its clock runs again, to 2030-01-01 13:10:00.000, by hand" in str(dq.explain_timeout(order, "remind"))


def test_the_countdown_of_a_stopped_clock(shown_row: Timeout, order: Order) -> None:
    with at(9):
        shown = countdown_of(order, "remind")
        assert (bool(shown), shown.is_stopped, shown.seconds_left, shown.is_due) == (True, True, 7800, False)
        assert countdown_of(shown_row).seconds_left == 7800
        (together,) = pending_countdowns([order], "remind")
        assert together is not None and together.seconds_left == 7800
        html = Template("{% load delayq %}{% countdown order 'remind' %}").render(Context({"order": order}))
    assert 'data-rest="7800000"' in html and "stopped, 2 h 10 min left" in html


def test_it_is_shown_that_it_is_paused_and_its_deadline(order: Order, admin_client: Client) -> None:
    with at(0):
        dq.schedule_timeout(order, "remind", hours=4)
    with at(1):
        dq.hold_timeout(order, "remind", keep_deadline=True)
        story = dq.explain_timeout(order, "remind")
        assert "It is paused until it is resumed. Its deadline stays" in story.outlook
        assert "paused, its deadline stays" in str(story)
        shown = countdown_of(order, "remind")
        assert (shown.is_paused, shown.is_stopped, shown.is_due, shown.seconds_left) == (True, False, False, 3 * 3600)
        page = admin_client.get(reverse("admin:django_delayq_timeout_changelist")).content.decode()
        assert "paused" in page and "stopped," not in page
    with at(5):
        countdown = countdown_of(order, "remind")
        assert (countdown.is_due, countdown.seconds_left) == (False, 0)
