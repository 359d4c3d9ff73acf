"""The ledger in the admin can be read with a permission, and cannot be changed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from django.utils.html import strip_spaces_between_tags

import django_delayq as dq
from django_delayq import operations
from django_delayq.admin import render
from django_delayq.models import Timeout
from tests.integration.admin.conftest import DETAIL, LIST
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def test_the_list_shows_policy_object_state_and_deadline(viewer: Client, row: Timeout) -> None:
    page = viewer.get(reverse(LIST)).content.decode()
    assert "testapp.order.remind" in page
    assert f"order {row.object_id}" in page
    assert '<span class="delayq-badge delayq-pending">' in page
    assert f"{timezone.localtime(row.due_at):%Y-%m-%d %H:%M:%S}" in page
    assert "&lt;b&gt;on request" in page


def addresses() -> list[str]:
    """All addresses of our pages that have arguments, with a NUL as each text of them."""
    ours = [each for model, each in admin.site._registry.items() if "delayq" in model._meta.app_label]
    found = []
    for pattern in (pattern for each in ours for pattern in each.get_urls() if pattern.name):
        texts = {"str": "\0", "path": "\0", "slug": "pause"}
        arguments = {
            name: texts[type(kind).__name__[:-9].lower().replace("string", "str")]
            for name, kind in pattern.pattern.converters.items()
        }
        found += [reverse(f"admin:{pattern.name}", kwargs=arguments)] if "\0" in arguments.values() else []
    return found


def test_no_address_with_a_nul_is_an_error(client: Client) -> None:
    client.force_login(User.objects.create_superuser("boss"))
    assert len(addresses()) > 10 and any("report" in each for each in addresses())
    for address in addresses():
        assert client.get(address).status_code < 500, address


def test_the_list_filters_by_state_and_policy_and_finds_ids_and_keys(viewer: Client, row: Timeout) -> None:
    other = Order.objects.create(created_at=timezone.now())
    dq.cancel_timeout(other, "cancel_unpaid")

    def found(**query: str) -> set[int]:
        return {one.pk for one in viewer.get(reverse(LIST), query).context["cl"].result_list}

    assert found(state__exact="pending") == {row.pk}
    assert found(state__exact="cancelled") == set(other.timeouts.values_list("pk", flat=True))
    assert found(policy="testapp.order.remind") == {row.pk}
    assert found(policy="testapp.order.cancel_unpaid") == set(other.timeouts.values_list("pk", flat=True))
    assert found(q="k1") == {row.pk}
    assert found(q=row.object_id) >= {row.pk}


def test_the_detail_page_tells_the_story(viewer: Client, row: Timeout) -> None:
    page = viewer.get(reverse(DETAIL, args=[row.pk])).content.decode()
    due = f"It is due at {timezone.localtime(row.due_at):%Y-%m-%d %H:%M:%S} unless"  # as precise as all other times
    for words in ("scheduled", "extended", "asked for it", due, "&lt;b&gt;on request"):
        assert words in page


def test_a_theme_that_strips_spaces_between_tags_does_not_join_words(row: Timeout) -> None:
    row.history += [{"at": "2026-01-01T00:00:00+00:00", "what": "failed", "error": "KeyError", "message": "total"}]
    for rendered in (render.story(row), render.failures(row)):
        assert strip_spaces_between_tags(rendered) == rendered


def test_rows_whose_object_or_policy_or_history_is_strange_still_show(viewer: Client, row: Timeout) -> None:
    failed = {"at": "2026-01-01T00:00:00+00:00", "what": "failed", "error": "KeyError", "traceback": "<script>"}
    Timeout.objects.update(policy="gone.order.policy", object_id="no such key", history=[failed])
    assert viewer.get(reverse(LIST)).status_code == 200
    page = viewer.get(reverse(DETAIL, args=[row.pk])).content.decode()
    assert "KeyError" in page
    assert "<script></pre>" not in page


def test_nobody_adds_changes_or_deletes_here(admin_client: Client, row: Timeout) -> None:
    assert admin_client.get(reverse("admin:django_delayq_timeout_add")).status_code == 403
    assert admin_client.get(reverse("admin:django_delayq_timeout_delete", args=[row.pk])).status_code == 403
    changed = admin_client.post(reverse(DETAIL, args=[row.pk]), {"reason": "x", "state": "fired"})
    assert changed.status_code == 403
    admin_client.post(reverse(LIST), {"action": "delete_selected", "_selected_action": [row.pk]})
    assert Timeout.objects.get().state == "pending"


@pytest.mark.parametrize("staff", [False, True])
def test_without_the_permission_nothing_is_shown(client: Client, row: Timeout, staff: bool) -> None:
    client.force_login(User.objects.create_user("other", is_staff=staff))
    assert client.get(reverse(LIST)).status_code in (302, 403)
    assert client.get(reverse(DETAIL, args=[row.pk])).status_code in (302, 403)


def test_the_list_neither_counts_the_table_nor_loads_objects(viewer: Client, row: Timeout) -> None:
    with CaptureQueriesContext(connection) as captured:
        viewer.get(reverse(LIST))
    statements = [query["sql"] for query in captured]
    assert not any("COUNT(" in sql and ") counted0" not in sql for sql in statements), "but for capped counts"
    assert not any('FROM "testapp_order"' in sql or "FROM `testapp_order`" in sql for sql in statements)
    (listing,) = [sql for sql in statements if "idempotency_key" in sql]
    assert "payload" not in listing


def test_the_story_of_a_late_firing_says_how_late(viewer: Client, row: Timeout, settings: Any) -> None:
    Timeout.objects.update(state="fired", cause="due", settled_at=row.due_at + timedelta(seconds=1.5), slot_taken=None)
    assert "1.5 s after the deadline" in viewer.get(reverse(DETAIL, args=[row.pk])).content.decode()


def test_the_story_of_an_early_firing_says_how_early(viewer: Client, row: Timeout) -> None:
    Timeout.objects.update(state="fired", cause="due", settled_at=row.due_at - timedelta(seconds=1.5), slot_taken=None)
    page = viewer.get(reverse(DETAIL, args=[row.pk])).content.decode()
    assert "1.5 s before the deadline" in page and "-1.5 s" not in page


def test_the_story_of_a_repeated_timeout_names_the_new_round(viewer: Client, row: Timeout) -> None:
    dq.cancel_timeout(row)
    operations.refire(row, by="admin:ann")
    new = Timeout.objects.get(state="pending")
    for pk, words in ((row.pk, f"fired again by the new round {new.pk}"), (new.pk, f"repeats the round {row.pk}")):
        assert words in viewer.get(reverse(DETAIL, args=[pk])).content.decode()
