"""What people see of a timeout whose clock is stopped, or which is paused."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.template import Context, Template
from django.test import Client
from django.urls import include, path, reverse
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq.contrib.countdown import countdown_of, pending_countdowns
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import snapshot
from django_delayq.testing import assert_fired, assert_scheduled
from tests.support.hours import HOUR, T0, at
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]
urlpatterns = [path("", include("tests.urls")), path("", include("tests.integration.contrib.rest.urls"))]


@pytest.fixture
def row(order: Order) -> Timeout:
    """A timeout with 2 h 10 min left."""
    with at(0):
        dq.schedule_timeout(order, "remind", hours=3, minutes=10)
    with at(1):
        held = dq.hold_timeout(order, "remind", reason="in talks", until=T0 + 24 * HOUR)
    assert held is not None
    return held


@pytest.fixture
def api() -> Any:
    client = APIClient()
    client.force_login(User.objects.create_superuser("boss"))
    return client


def test_the_story(row: Timeout, order: Order) -> None:
    story = dq.explain_timeout(order, "remind")
    assert "its clock is stopped, until 2030-01-02 09:00:00.000, 2 h 10 min left, by hand (in talks)" in str(story)
    assert story.outlook == "Its clock is stopped by hand until 2030-01-02 09:00:00; 2 h 10 min of its time is left."
    with at(2):
        dq.resume_timeout(order, "remind")
    assert "its clock runs again, to 2030-01-01 13:10:00.000, by hand" in str(dq.explain_timeout(order, "remind"))


def test_the_countdown(row: Timeout, order: Order) -> None:
    with at(9):
        shown = countdown_of(order, "remind")
        assert (bool(shown), shown.is_stopped, shown.seconds_left, shown.is_due) == (True, True, 7800, False)
        assert countdown_of(row).seconds_left == 7800
        (together,) = pending_countdowns([order], "remind")
        assert together is not None and together.seconds_left == 7800
        html = Template("{% load delayq %}{% countdown order 'remind' %}").render(Context({"order": order}))
    assert 'data-rest="7800000"' in html and "stopped, 2 h 10 min left" in html


def test_the_status_the_list_and_the_testing_kit(
    row: Timeout, order: Order, capsys: pytest.CaptureFixture[str]
) -> None:
    def output(*command: str) -> str:
        call_command(*command)
        return " ".join(capsys.readouterr().out.split())

    assert (snapshot().held.value, snapshot().pending.value) == (1, 0)
    assert "1 timeout on hold or paused" in output("delayq_status")
    listed = output("delayq_list", "--all")
    assert "held" in listed and "2108" not in listed
    assert "2 h 10 min of its time is left" in output("delayq_explain", "--id", str(row.pk))
    assert assert_scheduled(order, "remind") == row
    with pytest.raises(AssertionError, match="is held"):
        assert_fired(order, "remind")


def test_that_it_is_paused_and_its_deadline(order: Order, admin_client: Client, api: Any) -> None:
    with at(0):
        row = dq.schedule_timeout(order, "remind", hours=4)
    with at(1):
        dq.hold_timeout(order, "remind", keep_deadline=True)
        story = dq.explain_timeout(order, "remind")
        assert "It is paused until it is resumed. Its deadline stays" in story.outlook
        assert "paused, its deadline stays" in str(story)
        shown = countdown_of(order, "remind")
        assert (shown.is_paused, shown.is_stopped, shown.is_due, shown.seconds_left) == (True, False, False, 3 * 3600)
        page = admin_client.get(reverse("admin:django_delayq_timeout_changelist")).content.decode()
        assert "paused" in page and "stopped," not in page
    answer = api.get(f"/api/timeouts/{row.pk}/").json()
    assert (answer["keeps_deadline"], answer["remaining"], answer["run_at"]) == (True, None, None)
    with at(5):
        countdown = countdown_of(order, "remind")
        assert (countdown.is_due, countdown.seconds_left) == (False, 0)
