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
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import include, path, reverse
from rest_framework import serializers

import django_delayq as dq
from django_delayq import TimeoutPolicy
from django_delayq.admin import TimeoutAdmin, TimeoutAdminMixin, TimeoutInline
from django_delayq.contrib.rest_framework import DeadlineField
from django_delayq.models import Timeout
from tests.integration.matrix.keys import CASES, World, make_world
from tests.testapp import keys
from tests.testapp.models import Order

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


def test_the_list_of_objects_shows_and_filters_by_deadlines(world: World, browser: Client) -> None:
    dq.cancel_timeout(world.others[0], world.auto)
    dq.reschedule_timeout(world.obj, world.auto, minutes=5)
    meta = world.case.model._meta
    address = reverse(f"admin:{meta.app_label}_{meta.model_name}_changelist")
    shown = {obj.pk: obj for obj in browser.get(address).context["cl"].result_list}
    if len(shown) == 3:
        deadlines = {pk: obj.delayq_next_due for pk, obj in shown.items()}
        assert deadlines == {
            each.pk: min((row.due_at for row in world.rows(each) if row.slot_taken), default=None)
            for each in (world.obj, world.twin, world.others[0])
        }
    for value, expected in (("waiting", {world.obj.pk, world.twin.pk}), ("dead", set())):
        rows = browser.get(f"{address}?timeouts={value}").context["cl"].result_list
        assert {obj.pk for obj in rows} == expected
    dq.cancel_timeouts(dq.pending_timeouts(world.twin))
    assert [obj.pk for obj in browser.get(f"{address}?timeouts=hour").context["cl"].result_list] == [world.obj.pk]


@pytest.mark.parametrize("text", ["7E1234", "6ba7b810-9dad-11d1"])
def test_what_only_looks_like_a_key_is_searched_like_any_text(
    text: str, declare: Callable[..., TimeoutPolicy[Any]], browser: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = [make_world(case, declare) for case in CASES if case.model in {keys.AutoKey, keys.UUIDKey}]
    order = Order.objects.create()
    row = dq.schedule_timeout(order, "remind", hours=1, key=text)
    assert listed(browser, q=text) == [row.pk]
    assert [each["id"] for each in browser.get("/api/timeouts/", {"search": text}).json()["results"]] == [row.pk]
    call_command("delayq_explain", "--search", text)
    assert f"testapp.order.remind of {order.pk} ({text})" in capsys.readouterr().out
    for world in worlds:
        label = world.case.model._meta.label_lower
        assert listed(browser, object=f"{label}:{text}") == listed(browser, related=f"{label}:{text}") == []
        assert browser.get("/api/timeouts/", {"object": f"{label}:{text}"}).status_code == 400
        with pytest.raises(CommandError, match="is not a key of"):
            call_command("delayq_explain", label, text)


def test_a_deadline_field_reads_one_object_many_and_prefetched_ones(world: World) -> None:
    class Shown(serializers.Serializer[Any]):
        due = DeadlineField("auto")

    dq.cancel_timeout(world.obj, world.auto)
    dq.reschedule_timeout(world.twin, world.auto, hours=9)
    expected = {obj.pk: dq.get_deadline(obj, "auto") for obj in (world.obj, world.twin, world.others[0])}
    rows = world.case.model._base_manager
    for found in (list(rows.all()), list(rows.prefetch_related("timeouts"))):
        data = Shown(found, many=True).data
        given = {obj.pk: each["due"] and each["due"]["due_at"] for obj, each in zip(found, data, strict=True)}
        field = serializers.DateTimeField()
        assert given == {pk: due and field.to_representation(due) for pk, due in expected.items()}
    assert Shown(world.obj).data["due"] is None
