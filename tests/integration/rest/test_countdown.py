"""The countdown of an object for its owner: refused by default, cheap to ask again, right by the server's clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from rest_framework.permissions import AllowAny
from rest_framework.test import APIClient, APIRequestFactory
from rest_framework.throttling import ScopedRateThrottle

import django_delayq as dq
from django_delayq import clock
from django_delayq.contrib.rest_framework import CountdownView
from django_delayq.models import Timeout
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db
Schedule = Callable[..., Timeout]
MINE: dict[str, Any] = {"headers": {"X-Note": "mine"}}


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new", note="mine")


@pytest.fixture
def url(order: Order) -> str:
    return reverse("countdown", args=[order.pk])


def test_without_a_permission_of_the_projects_own_everybody_is_refused(order: Order) -> None:
    boss = APIClient()
    boss.force_login(User.objects.create_superuser("boss"))
    for client in (APIClient(), boss):
        for pk in (order.pk, 999):
            assert client.get(reverse("closed", args=[pk]), **MINE).status_code in (401, 403)


def test_scripts_can_read_the_times_whatever_format_the_project_has(
    url: str, schedule: Schedule, order: Order, settings: Any
) -> None:
    """2026-12-11 was read as 12 November, and with a time of day as no time at all."""
    due_at = schedule(order=order).due_at
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DATETIME_FORMAT": "%d.%m.%Y %H:%M"}
    found = APIClient().get(url, **MINE).json()
    assert datetime.fromisoformat(found["due_at"]) == due_at
    assert datetime.fromisoformat(found["server_time"]) < due_at


def test_somebody_elses_object_is_not_found_like_one_that_does_not_exist(url: str, order: Order) -> None:
    stranger = APIClient().get(url, headers={"X-Note": "yours"})
    missing = APIClient().get(reverse("countdown", args=[999]), **MINE)
    assert (stranger.status_code, missing.status_code) == (404, 404)
    assert stranger.data == missing.data


def test_an_address_may_have_a_throttle_scope_of_its_own(
    order: Order, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "own"}}
    monkeypatch.setattr(ScopedRateThrottle, "THROTTLE_RATES", {"own": "1/hour"})
    cache.clear()
    view = CountdownView.as_view(
        policy="testapp.order.remind",
        permission_classes=[AllowAny],
        throttle_classes=[ScopedRateThrottle],
        throttle_scope="own",
    )
    assert [view(APIRequestFactory().get("/"), pk=order.pk).status_code for _ in range(2)] == [200, 429]


def test_the_owner_learns_how_long_is_left_and_what_time_the_server_has(
    url: str, order: Order, schedule: Schedule
) -> None:
    row = schedule(order=order)
    with clock.set_to(row.due_at - timedelta(seconds=89, milliseconds=1)):
        assert '"seconds_left":90,' in APIClient().get(url, **MINE).content.decode()
    with clock.set_to(row.due_at - timedelta(seconds=90)):
        answer = APIClient().get(url, **MINE)
    shown = answer.json()
    assert (shown["seconds_left"], shown["state"]) == (90, "pending")
    assert parse_datetime(shown["due_at"]) == row.due_at
    assert parse_datetime(shown["server_time"]) == row.due_at - timedelta(seconds=90)
    assert int(answer["X-Server-Time"]) == clock.to_ms(row.due_at - timedelta(seconds=90))
    assert set(answer["Cache-Control"].split(", ")) == {"private", "no-cache"}


def test_times_have_an_offset_also_in_a_project_without_time_zones(
    order: Order, schedule: Schedule, settings: Any
) -> None:
    settings.USE_TZ = False
    schedule(order=order)
    view = CountdownView.as_view(policy="testapp.order.remind", permission_classes=[AllowAny])
    answer = view(APIRequestFactory().get("/"), pk=order.pk).data
    times = [parse_datetime(answer[name]) for name in ("due_at", "server_time")]
    assert all(at is not None and at.utcoffset() is not None for at in times)


def test_nothing_is_told_but_moment_and_state(url: str, order: Order, schedule: Schedule) -> None:
    schedule(order=order, reason="not trusted", payload={"secret": 1})
    shown = APIClient().get(url, **MINE).json()
    assert shown.keys() == {"due_at", "seconds_left", "is_paused", "state", "server_time"}


def test_the_same_answer_is_not_sent_twice(url: str, order: Order, schedule: Schedule) -> None:
    row = schedule(order=order)
    client = APIClient()
    tag = client.get(url, **MINE)["ETag"]
    again: dict[str, Any] = {"headers": {"X-Note": "mine", "If-None-Match": tag}}
    later = timezone.now() + timedelta(seconds=20)
    with clock.set_to(later):
        unchanged = client.get(url, **again)
    assert (unchanged.status_code, unchanged.content, unchanged["ETag"]) == (304, b"", tag)
    assert int(unchanged["X-Server-Time"]) == clock.to_ms(later)
    assert "no-cache" in unchanged["Cache-Control"]
    dq.extend_timeout(row, minutes=1)
    moved = client.get(url, **again)
    assert moved.status_code == 200
    dq.cancel_timeout(row)
    settled = client.get(url, headers={"X-Note": "mine", "If-None-Match": moved["ETag"]})
    assert (settled.json()["state"], settled.json()["seconds_left"]) == ("cancelled", None)


def test_the_tag_reveals_no_id_because_it_depends_on_the_secret_key(
    url: str, order: Order, schedule: Schedule, settings: Any
) -> None:
    schedule(order=order)
    tag = APIClient().get(url, **MINE)["ETag"]
    settings.SECRET_KEY = "another"
    assert APIClient().get(url, **MINE)["ETag"] != tag


def test_what_was_never_scheduled_has_no_deadline(url: str) -> None:
    shown = APIClient().get(url, **MINE).json()
    assert (shown["due_at"], shown["seconds_left"], shown["state"]) == (None, None, None)


def test_it_takes_two_queries(url: str, order: Order, schedule: Schedule) -> None:
    schedule(order=order)
    APIClient().get(url, **MINE)
    with CaptureQueriesContext(connection) as captured:
        APIClient().get(url, **MINE)
    assert len(captured) == 2


def test_an_address_may_name_what_nobody_can_guess(order: Order, schedule: Schedule) -> None:
    schedule(order=order, key="k")
    view = CountdownView.as_view(
        policy=dq.get_policy("testapp.order.remind"), key="k", lookup_field="note",
        queryset=Order.objects.exclude(status="paid"), permission_classes=[AllowAny],
    )  # fmt: skip
    request = APIRequestFactory().get("/")
    assert view(request, note="mine").data["state"] == "pending"
    Order.objects.update(status="paid")
    assert view(request, note="mine").status_code == 404


def test_a_countdown_of_no_policy_is_a_mistake_of_the_projects(order: Order) -> None:
    view: Any = CountdownView.as_view(permission_classes=[AllowAny], queryset=Order.objects.all())
    with pytest.raises(TypeError, match="needs a policy"):
        view(APIRequestFactory().get("/"), pk=order.pk)
