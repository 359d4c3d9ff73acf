"""A banner states why nothing fires on each page where people ask that; failing timeouts do not seem healthy."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import strip_tags

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import Timeout
from tests.integration.admin.conftest import Staff, listed, policy_shown, source
from tests.integration.admin.places import DETAIL, LIST, OPERATE, POLICIES, REMIND
from tests.integration.management.conftest import a_worker
from tests.testapp.models import Order

cold = pytest.mark.usefixtures("controls_are_read_again")
pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.integration.admin.sites"), cold]
NO_WORKER = "No worker is running: nothing fires. Start one: manage.py delayq_worker"


@pytest.fixture
def row() -> Timeout:
    found: Timeout = dq.schedule_timeout(Order.objects.create(status="new"), "remind", hours=1)
    return found


def pages(row: Timeout) -> dict[str, str]:
    return {
        "list": reverse(LIST),
        "timeout": reverse(DETAIL, args=[row.pk]),
        "policies": reverse(POLICIES),
        "inline": reverse("admin:testapp_order_change", args=[row.object_id]),
        "report": reverse("admin:django_delayq_policycontrol_report", args=[row.policy]),
    }


def banners(client: Client, address: str) -> list[str]:
    found = re.findall(r'(?s)<p class="delayq-stopped[^"]*" role="alert"[^>]*>(.*?)</p>', source(client, address))
    return [" ".join(html.unescape(strip_tags(each)).split()).removeprefix("⚠ ") for each in found]


def on_pages(client: Client, row: Timeout) -> list[str]:
    """Return the one list of banners that all pages show."""
    found = {name: banners(client, address) for name, address in pages(row).items()}
    assert all(each == found["list"] for each in found.values()), found
    return found["list"]


def test_each_page_says_which_workers_are_missing(admin_client: Client, row: Timeout, settings: Any) -> None:
    assert on_pages(admin_client, row) == [NO_WORKER]
    worker = a_worker(queues=["default"])
    assert on_pages(admin_client, row) == []
    Timeout.objects.update(queue="mail")
    for name in ("timeout", "inline"):
        (banner,) = banners(admin_client, pages(row)[name])
        assert banner == "No worker serves the queue 'mail'. Start one: manage.py delayq_worker --queue mail"
    worker.delete()
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://localhost:1/0"}
    a_worker(), a_worker(uses_redis=False)
    (banner,) = on_pages(admin_client, row)
    assert banner.startswith("Workers that do not reach Redis") and banner.endswith(": 1 of 2.")
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert banners(admin_client, pages(row)["list"]) == []


def test_a_stopped_policy_is_named_with_its_reason_and_a_link_that_resumes_it(
    admin_client: Client, staff: Staff, row: Timeout
) -> None:
    a_worker()
    operations.hold(REMIND, by="admin:ann", reason="the provider is down")
    link = f'href="{reverse(OPERATE, args=[REMIND, "resume"])}"'
    for name in ("list", "timeout", "inline", "report"):
        (banner,) = banners(admin_client, pages(row)[name])
        assert banner.startswith(f"{REMIND} On hold since") and "By admin:ann: the provider is down" in banner, name
        assert link in source(admin_client, pages(row)[name])
    assert link not in source(staff("view_timeout"), LIST)
    (banner,) = banners(admin_client, f"{reverse(LIST)}?policy={REMIND}")
    assert banner.startswith(REMIND)
    assert banners(admin_client, f"{reverse(LIST)}?policy=testapp.order.linger") == []
    (banner,) = banners(admin_client, pages(row)["policies"])
    assert banner.startswith("Policies that are stopped: 1 of ") and "Resume" in banner
    operations.pause("testapp.order.linger", by="admin:ann")
    for name in ("list", "policies"):
        (banner,) = banners(admin_client, pages(row)[name])
        assert banner.startswith("Policies that are stopped: 2 of "), name


def test_each_page_states_how_many_are_due_for_more_than_a_minute(
    admin_client: Client, staff: Staff, row: Timeout
) -> None:
    a_worker()
    soon = dq.schedule_timeout(Order.objects.create(status="new"), "linger", hours=1)
    for pk, seconds in ((row.pk, 120), (soon.pk, 20)):
        Timeout.objects.filter(pk=pk).update(run_at=timezone.now() - timedelta(seconds=seconds))
    backlog = "Timeouts that have been due for more than a minute: 1. Show"
    assert on_pages(admin_client, row) == [backlog]
    (link,) = re.findall(r'href="([^"]*)">Show<', source(admin_client, pages(row)["timeout"]))
    assert listed(admin_client, html.unescape(link)) == [row.pk]
    assert banners(staff("view_policycontrol"), pages(row)["policies"]) == [backlog.removesuffix(" Show")]
    assert banners(admin_client, pages(soon)["timeout"]) == [], "it is of another policy"
    operations.pause(REMIND, by="admin:ann")
    (banner,) = banners(admin_client, pages(row)["list"])
    assert "Paused since" in banner, "what a stopped policy does not fire is not a backlog"


def test_failing_timeouts_have_a_badge_a_filter_and_a_count(admin_client: Client, row: Timeout) -> None:
    healthy = dq.schedule_timeout(Order.objects.create(status="new"), "remind", hours=1)
    Timeout.objects.filter(pk=row.pk).update(attempts=6, run_at=timezone.now() + timedelta(minutes=40))
    for name in ("list", "timeout", "inline"):
        assert source(admin_client, pages(row)[name]).count("delayq-badge delayq-failing") == 1, name
    assert "delayq-failing" not in source(admin_client, pages(healthy)["timeout"])
    failing_only = f"{reverse(LIST)}?due=failing"
    assert listed(admin_client, failing_only) == [row.pk]
    assert "failing: an attempt has failed" in source(admin_client, failing_only)
    (failing,) = [each for each in policy_shown(admin_client, REMIND)["numbers"] if each["name"] == "failing"]
    assert (str(failing["count"]), failing["is_bad"]) == ("1", True)
    assert listed(admin_client, failing["address"]) == [row.pk]
