"""Each type of primary key in the admin and in REST: the object's own timeouts, and none of another object's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.test import Client
from django.urls import include, path, reverse

import django_delayq as dq
from django_delayq import TimeoutPolicy
from django_delayq.admin import TimeoutAdmin, TimeoutAdminMixin, TimeoutInline
from django_delayq.models import Timeout
from tests.integration.matrix.keys import CASES, World, make_world

site = admin.AdminSite(name="admin")


class KeyedAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    inlines = (TimeoutInline,)
    fields = ("status",)
    show_full_result_count = False


site.register(Timeout, TimeoutAdmin)
for model in {case.model for case in CASES}:
    site.register(model, KeyedAdmin)
urlpatterns = [path("admin/", site.urls), path("api/", include("django_delayq.contrib.rest_framework.urls"))]

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db, pytest.mark.urls(__name__)]
LIST = "/admin/django_delayq/timeout/"


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def world(request: pytest.FixtureRequest, declare: Callable[..., TimeoutPolicy[Any]]) -> World:
    made = make_world(request.param, declare)
    dq.schedule_timeout(made.twin, made.hand, hours=1)
    return made


@pytest.fixture
def browser(db: None) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def listed(client: Client, **query: Any) -> list[int]:
    """Return the ids of the timeouts in the list."""
    return sorted(row.pk for row in client.get(f"{LIST}?{urlencode(query)}").context["cl"].result_list)


def test_the_page_of_an_object_lists_its_timeouts_and_links_to_all_of_them(world: World, browser: Client) -> None:
    meta = world.case.model._meta
    for obj in (world.obj, world.twin):
        ids = [row.pk for row in world.rows(obj)]
        address = reverse(f"admin:{meta.app_label}_{meta.model_name}_change", args=[quote(obj.pk)])
        page = browser.get(address).content.decode()
        found = {int(number) for number in re.findall(r"/admin/django_delayq/timeout/(\d+)/change/", page)}
        assert found == set(ids)
        parameters = re.search(r'href="[^"]*/django_delayq/timeout/\?(object=[^"]*)"', page)
        assert parameters is not None
        assert sorted(row.pk for row in browser.get(f"{LIST}?{parameters[1]}").context["cl"].result_list) == ids


def test_the_timeouts_of_an_object_are_found_in_the_admin_and_by_rest(world: World, browser: Client) -> None:
    row, meta = world.row(world.obj, world.auto), world.case.model._meta
    same = {each.pk for each in Timeout.objects.all() if each.object_id == row.object_id}
    assert row.pk in same == set(listed(browser, q=row.object_id))
    page = browser.get(reverse("admin:django_delayq_timeout_change", args=[row.pk]))
    assert page.status_code == 200
    for name in {world.case.policy_model._meta.label_lower, *([meta.label_lower] if meta.proxy else [])}:
        found = browser.get("/api/timeouts/", {"object": f"{name}:{row.object_id}"}).json()["results"]
        assert [each["id"] for each in found] == [each.pk for each in reversed(world.rows(world.obj))]
    assert browser.get(f"/api/timeouts/{row.pk}/").json()["object"]["id"] == row.object_id
