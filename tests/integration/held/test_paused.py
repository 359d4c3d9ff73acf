"""A paused timeout does not fire, and keeps its deadline: when it is resumed, it is due at once if that has passed."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db.models import Q
from django.test import Client
from django.urls import include, path, reverse
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import operations
from django_delayq.arming import holding
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout
from django_delayq.operations import Refusal
from tests.integration.held.times import HOUR, T0, Declare, again, at, hours
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]
urlpatterns = [path("", include("tests.urls")), path("", include("tests.integration.rest.urls"))]
BY = "admin:alice"
OPEN: dict[str, Any] = {"since": "created_at", "when": ~Q(status="closed"), "hold_when": Q(status="waiting")}


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    return declare(Order, name="answer", after=4 * HOUR, **OPEN)


def opened(status: str = "open") -> tuple[Order, Timeout]:
    with at(0):
        order = Order.objects.create(status=status, created_at=T0)
    return order, Timeout.objects.get(policy="testapp.order.answer", object_id=str(order.pk))


def test_it_keeps_its_deadline_and_is_due_at_once_if_that_has_passed(policy: Any) -> None:
    (_, soon), (_, later) = opened(), opened()
    rows = Timeout.objects.filter(policy=policy.label)
    with at(1):
        assert operations.postpone(later, by=BY, hours=4).changed == 1
        assert operations.pause_timeout(rows, by=BY, reason="provider is down").changed == 2
    assert [(again(row).state, again(row).is_paused, hours(again(row).due_at)) for row in (soon, later)] == [
        ("held", True, 4),
        ("held", True, 8),
    ]
    with at(6):
        assert not Timeout.objects.due().exists()
        assert operations.resume_timeout(rows, by=BY, dry_run=True).due_at_once == 1
        done = operations.resume_timeout(rows, by=BY)
        assert (done.changed, done.due_at_once) == (2, 1)
        assert [(again(row).state, hours(again(row).due_at)) for row in (soon, later)] == [
            ("pending", 4),
            ("pending", 8),
        ]
        assert list(Timeout.objects.due()) == [soon]
    row = again(soon)
    assert (row.keeps_deadline, row.held_by_hand, row.remaining, row.is_computed) == (False, False, None, True)
    assert [event["what"] for event in row.history] == ["paused", "resumed"]


def test_its_end_resumes_it(policy: Any) -> None:
    order, row = opened()
    with at(1):
        paused = dq.hold_timeout(order, "answer", until=T0 + 6 * HOUR, keep_deadline=True, reason="talks")
        assert paused is not None and paused.is_paused
    with at(7):
        assert holding.end_holds_by_hand("default") == 1
        assert list(Timeout.objects.due()) == [row]
    assert (hours(again(row).due_at), hours(again(row).run_at)) == (4, 6)


def test_its_deadline_can_be_moved_and_it_can_be_cancelled(policy: Any) -> None:
    (order, row), (_, other) = opened(), opened()
    with at(1):
        operations.pause_timeout([row, other], by=BY)
    with at(2):
        dq.extend_timeout(order, "answer", hours=1)
        assert (again(row).is_paused, hours(again(row).due_at)) == (True, 5)
        operations.change_deadline(row, by=BY, shift=-2 * HOUR)
        assert (again(row).is_paused, hours(again(row).due_at)) == (True, 3)
        assert operations.fire_now(row, by=BY).refused == {Refusal.HELD: 1}
        assert operations.replan(row, by=BY, hand_set=True).changed == 1
        assert (again(row).is_paused, hours(again(row).due_at)) == (True, 4)
        assert operations.cancel(other, by=BY).changed == 1
        dq.resume_timeout(order, "answer")
    assert (again(row).state, hours(again(row).run_at)) == ("pending", 4)


def test_a_pause_and_a_stopped_clock_replace_each_other(policy: Any) -> None:
    order, row = opened()
    with at(1):
        operations.pause_timeout(row, by=BY)
    with at(2):
        operations.hold_timeout(row, by=BY)
        assert (again(row).has_stopped_clock, again(row).remaining) == (True, 2 * HOUR)
    with at(3):
        operations.pause_timeout(row, by=BY)
        assert (again(row).has_stopped_clock, again(row).remaining) == (True, 2 * HOUR), "it has no deadline to keep"
        dq.resume_timeout(order, "answer")
    assert hours(again(row).due_at) == 5


def test_a_condition_that_stops_the_clock_meanwhile_counts_from_the_end_of_the_pause(policy: Any) -> None:
    order, row = opened()
    with at(1):
        operations.pause_timeout(row, by=BY)
    with at(2):
        order.status = "waiting"
        order.save()
        assert again(row).is_paused
    with at(3):
        seen = operations.resume_timeout(row, by=BY)
        assert (seen.changed, seen.due_at_once) == (1, 0)
        assert (again(row).has_stopped_clock, again(row).held_by_hand, again(row).remaining) == (True, False, HOUR)
    with at(10):
        order.status = "open"
        order.save()
    assert (again(row).state, hours(again(row).due_at)) == ("pending", 11)


def test_a_round_that_its_condition_ends_and_arms_again_has_its_deadline(policy: Any) -> None:
    order, row = opened()
    with at(1):
        operations.pause_timeout(row, by=BY)
        order.status = "closed"
        order.save()
    with at(2):
        order.status = "open"
        order.save()
    (found,) = dq.pending_timeouts(order, "answer")
    assert (found.state, hours(found.due_at)) == ("pending", 4)


def test_a_retry_that_waits_for_longer_goes_on_waiting(policy: Any) -> None:
    _, row = opened()
    Timeout.objects.filter(pk=row.pk).update(run_at=T0 + 6 * HOUR, attempts=1)
    with at(5):
        operations.pause_timeout(row, by=BY)
        assert operations.resume_timeout(row, by=BY).due_at_once == 0
    assert (hours(again(row).due_at), hours(again(row).run_at)) == (4, 6)


def test_a_hold_of_its_policy_moves_its_deadline(policy: Any, settings: Any) -> None:
    _, row = opened()
    with at(1):
        operations.pause_timeout(row, by=BY)
        operations.hold(policy, by=BY)
    with at(3):
        operations.resume(policy, by=BY)
    assert (again(row).is_paused, hours(again(row).due_at)) == (True, 6)


def test_people_see_that_it_is_paused_and_its_deadline(
    policy: Any, admin_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    order, row = opened()
    with at(1):
        call_command("delayq_pause_timeout", f"--id={row.pk}")
        assert "1 paused" in capsys.readouterr().out
        story = dq.explain_timeout(order, "answer")
        assert "It is paused until it is resumed. Its deadline stays" in story.outlook
        assert "paused, its deadline stays" in str(story)
        call_command("delayq_list", id=[row.pk])
        assert " paused " in capsys.readouterr().out
        shown = countdown_of(order, "answer")
        assert (shown.is_paused, shown.is_stopped, shown.is_due, shown.seconds_left) == (True, False, False, 3 * 3600)
        page = admin_client.get(reverse("admin:django_delayq_timeout_changelist")).content.decode()
        assert "paused" in page and "stopped," not in page
    api = APIClient()
    api.force_login(User.objects.get(username="admin"))
    answer = api.get(f"/api/timeouts/{row.pk}/").json()
    assert (answer["keeps_deadline"], answer["remaining"], answer["run_at"]) == (True, None, None)
    with at(5):
        done = api.post(f"/api/timeouts/{row.pk}/resume_timeout/", {"dry_run": True}, format="json").json()
        assert (done["changed"], done["due_at_once"]) == (True, True)
        address = reverse("admin:django_delayq_timeout_operate", args=["resume_timeout"])
        page = admin_client.get(address, {"ids": row.pk}).content.decode()
        assert "1 timeout will be resumed." in page and "1 is due and fires now." in page
        call_command("delayq_resume_timeout", f"--id={row.pk}", "--dry-run")
        assert "1 resumed, 1 of them due at once" in capsys.readouterr().out
        countdown = countdown_of(order, "answer")
        assert (countdown.is_due, countdown.seconds_left) == (False, 0)


def test_a_strict_guard_counts_a_deadline_that_has_passed_while_it_was_paused(policy: Any) -> None:
    order, row = opened()
    with at(1):
        operations.pause_timeout(row, by=BY)
    with at(5), pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, "answer", strict=True):
        pass
    with at(5), dq.before_deadline(order, "answer"):
        pass
    assert again(row).state == "cancelled"
