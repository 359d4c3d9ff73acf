"""A banner states why nothing fires on each page where people ask that; failing timeouts do not seem healthy."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse
from django.utils import timezone
from django.utils.html import strip_tags

import django_delayq as dq
from django_delayq import operations
from django_delayq.admin import PolicyControlAdmin, TimeoutAdmin, TimeoutInline
from django_delayq.models import PolicyControl, Timeout
from tests.integration.admin.conftest import DETAIL, LIST, policy_shown
from tests.integration.commands.conftest import a_worker
from tests.testapp.models import Customer, Order

site = admin.AdminSite(name="admin")


class WithTimeouts(admin.ModelAdmin):  # type: ignore[type-arg]
    inlines = (TimeoutInline,)


site.register(Timeout, TimeoutAdmin)
site.register(PolicyControl, PolicyControlAdmin)
site.register([Order, Customer], WithTimeouts)
urlpatterns = [path("admin/", site.urls)]
pytestmark = [
    pytest.mark.django_db,
    pytest.mark.urls(__name__),
    pytest.mark.usefixtures("controls_are_read_again"),
]
POLICIES = "admin:django_delayq_policycontrol_changelist"
REMIND = "testapp.order.remind"
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
    page = client.get(address).content.decode()
    found = re.findall(r'(?s)<p class="delayq-stopped[^"]*" role="alert"[^>]*>(.*?)</p>', page)
    return [" ".join(html.unescape(strip_tags(each)).split()).removeprefix("⚠ ") for each in found]


def test_each_page_says_that_no_worker_is_running(admin_client: Client, row: Timeout) -> None:
    for name, address in pages(row).items():
        assert banners(admin_client, address) == [NO_WORKER], name
    a_worker()
    for name, address in pages(row).items():
        assert banners(admin_client, address) == [], name


def test_a_queue_without_a_worker_is_named_where_its_rows_are(admin_client: Client, row: Timeout) -> None:
    a_worker(queues=["default"])
    Timeout.objects.filter(pk=row.pk).update(queue="mail")
    for name in ("timeout", "inline"):
        (banner,) = banners(admin_client, pages(row)[name])
        assert banner == "No worker serves the queue 'mail'. Start one: manage.py delayq_worker --queue mail"


@pytest.mark.parametrize(("verb", "word"), [("pause", "Paused since"), ("hold", "On hold since")])
def test_a_stopped_policy_is_named_with_its_reason_and_a_link_that_resumes_it(
    admin_client: Client, staff: Callable[..., Client], row: Timeout, verb: str, word: str
) -> None:
    a_worker()
    getattr(operations, verb)(REMIND, by="admin:ann", reason="the provider is down")
    resume = reverse("admin:django_delayq_policycontrol_operate", args=[REMIND, "resume"])
    for name in ("list", "timeout", "inline", "report"):
        (banner,) = banners(admin_client, pages(row)[name])
        assert banner.startswith(f"{REMIND} {word}") and "By admin:ann: the provider is down" in banner, name
        assert f'href="{resume}"' in admin_client.get(pages(row)[name]).content.decode()
    assert f'href="{resume}"' not in staff("view_timeout").get(pages(row)["list"]).content.decode()
    (banner,) = banners(admin_client, f"{reverse(LIST)}?policy={REMIND}")
    assert banner.startswith(REMIND)
    assert banners(admin_client, f"{reverse(LIST)}?policy=testapp.order.linger") == []


def test_each_page_states_how_many_timeouts_have_been_due_for_more_than_a_minute(
    admin_client: Client, staff: Callable[..., Client], row: Timeout
) -> None:
    a_worker()
    soon = dq.schedule_timeout(Order.objects.create(status="new"), "linger", hours=1)
    Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now() - timedelta(minutes=2))
    Timeout.objects.filter(pk=soon.pk).update(run_at=timezone.now() - timedelta(seconds=20))
    backlog = "Timeouts that have been due for more than a minute: 1. Show"
    for name, address in pages(row).items():
        assert banners(admin_client, address) == [backlog], name
    page = admin_client.get(pages(row)["timeout"]).content.decode()
    (link,) = re.findall(r'href="([^"]*)">Show<', page)
    assert [each.pk for each in admin_client.get(html.unescape(link)).context["cl"].result_list] == [row.pk]
    assert banners(staff("view_policycontrol"), pages(row)["policies"]) == [backlog.removesuffix(" Show")]
    assert banners(admin_client, pages(soon)["timeout"]) == [], "it is of another policy"
    operations.pause(REMIND, by="admin:ann")
    (banner,) = banners(admin_client, pages(row)["list"])
    assert "Paused since" in banner, "what a stopped policy does not fire is not a backlog"


def test_workers_that_do_not_reach_redis_are_counted(admin_client: Client, row: Timeout, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://localhost:1/0"}
    a_worker(), a_worker(uses_redis=False)
    for name, address in pages(row).items():
        (banner,) = banners(admin_client, address)
        assert banner.startswith("Workers that do not reach Redis") and banner.endswith(": 1 of 2."), name
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert banners(admin_client, pages(row)["list"]) == []


def test_a_settled_timeout_has_no_banner_and_one_of_a_removed_policy_has(admin_client: Client, row: Timeout) -> None:
    Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.forgotten")
    a_worker()
    (banner,) = banners(admin_client, pages(row)["timeout"])
    assert "no longer declared" in banner
    operations.cancel(row, by="admin:ann", reason="x")
    assert banners(admin_client, pages(row)["timeout"]) == banners(admin_client, pages(row)["inline"]) == []


def test_failing_timeouts_have_a_badge_a_filter_and_a_count(admin_client: Client, row: Timeout) -> None:
    healthy = dq.schedule_timeout(Order.objects.create(status="new"), "remind", hours=1)
    Timeout.objects.filter(pk=row.pk).update(attempts=6, run_at=timezone.now() + timedelta(minutes=40))
    for name in ("list", "timeout", "inline"):
        page = admin_client.get(pages(row)[name]).content.decode()
        assert page.count("delayq-badge delayq-failing") == 1, name
    assert "delayq-failing" not in admin_client.get(reverse(DETAIL, args=[healthy.pk])).content.decode()
    listed = admin_client.get(f"{reverse(LIST)}?due=failing")
    assert [each.pk for each in listed.context["cl"].result_list] == [row.pk]
    assert "failing: an attempt has failed" in listed.content.decode()
    shown = policy_shown(admin_client, REMIND)
    (failing,) = [count for count in shown["numbers"] if count["name"] == "failing"]
    assert (str(failing["count"]), failing["is_bad"]) == ("1", True)
    assert admin_client.get(failing["address"]).context["cl"].result_count == 1


def test_the_list_can_begin_with_what_is_due_next(admin_client: Client) -> None:
    late, soon = (dq.schedule_timeout(Order.objects.create(status="new"), "remind", hours=hours).pk for hours in (9, 1))
    page = admin_client.get(reverse(LIST))
    assert [row.pk for row in page.context["cl"].result_list] == [soon, late], "newest first"
    assert '<a href="?due=waiting">Show the next deadlines first</a>' in page.content.decode()
    again = admin_client.get(f"{reverse(LIST)}?due=waiting")
    assert [row.pk for row in again.context["cl"].result_list] == [soon, late]
    assert "soonest first" in again.content.decode() and "Show the next deadlines first" not in again.content.decode()


def test_a_banner_costs_each_page_a_constant_number_of_queries(admin_client: Client, row: Timeout) -> None:
    def queries(name: str) -> int:
        with CaptureQueriesContext(connection) as captured:
            admin_client.get(pages(row)[name])
        return len(captured)

    for name in pages(row):
        queries(name)
        before = queries(name)
        for _ in range(5):
            dq.schedule_timeout(Order.objects.get(pk=row.object_id), "remind", key=f"{name}{_}", hours=1)
        assert queries(name) == before, name
