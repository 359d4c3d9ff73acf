"""The pages of timeouts: what they show of a row, its story and its attempts, and which visitors see them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import operations
from django_delayq.models import Timeout
from tests.integration.admin.conftest import DETAIL, LIST, UNPAID, source
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def detail(client: Client, row: Timeout) -> str:
    return source(client, reverse(DETAIL, args=[row.pk]))


def test_the_pages_show_policy_object_state_deadline_key_and_story(viewer: Client, row: Timeout) -> None:
    due = f"{timezone.localtime(row.due_at):%Y-%m-%d %H:%M:%S}"
    Timeout.objects.update(key="<b>7")
    page = source(viewer, LIST)
    for text in ("testapp.order.remind", f"order {row.object_id}", due, "&lt;b&gt;on request"):
        assert text in page
    assert '<span class="delayq-badge delayq-pending">' in page
    assert page.count("key: ") == 1 and "key: <bdi>&lt;b&gt;7</bdi>" in page
    page = detail(viewer, row)
    for text in ("scheduled", "extended", "asked for it", f"It is due at {due} unless", "&lt;b&gt;on request"):
        assert text in page
    assert f"order {row.object_id}" in page and "/testapp/order/" not in page, "no admin shows this project's orders"


def test_the_story_says_how_late_or_early_it_fired_and_names_the_new_round(viewer: Client, row: Timeout) -> None:
    for seconds, told in ((1.5, "1.5 s after the deadline"), (-1.5, "1.5 s before the deadline")):
        settled_at = row.due_at + timedelta(seconds=seconds)
        Timeout.objects.update(state="fired", cause="due", settled_at=settled_at, slot_taken=None)
        page = detail(viewer, row)
        assert told in page and "-1.5 s" not in page
    operations.refire(Timeout.objects.get(), by="admin:ann")
    new = Timeout.objects.get(state="pending")
    assert f"fired again by the new round {new.pk}" in detail(viewer, row)
    assert f"repeats the round {row.pk}" in detail(viewer, new)


def test_only_who_may_view_sees_the_pages_and_nobody_changes_rows(
    admin_client: Client, client: Client, row: Timeout
) -> None:
    for is_staff in (False, True):
        client.force_login(User.objects.create_user(f"other{is_staff}", is_staff=is_staff))
        for address in (reverse(LIST), reverse(DETAIL, args=[row.pk])):
            assert client.get(address).status_code in (302, 403)
    assert admin_client.get(reverse("admin:django_delayq_timeout_add")).status_code == 403
    assert admin_client.get(reverse("admin:django_delayq_timeout_delete", args=[row.pk])).status_code == 403
    changed = admin_client.post(reverse(DETAIL, args=[row.pk]), {"reason": "x", "state": "fired"})
    assert changed.status_code == 403
    admin_client.post(reverse(LIST), {"action": "delete_selected", "_selected_action": [row.pk]})
    assert Timeout.objects.get().state == "pending"


def test_a_round_that_its_condition_ended_shows_the_values_of_now_to_who_may_view_the_object(
    admin_client: Client, viewer: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    order.status = "paid by phone"
    order.save()
    row = Timeout.objects.get(policy=UNPAID)
    assert (row.state, row.cause) == ("cancelled", "condition")
    assert "The object has now: <code>status = &quot;paid by phone&quot;</code>" in detail(admin_client, row)
    assert "paid by phone" not in detail(viewer, row)
    call_command("delayq_explain", "testapp.order", str(order.pk), policy="cancel_unpaid")
    assert 'The object has now: status = "paid by phone"' in capsys.readouterr().out
    Order.objects.filter(pk=order.pk).delete()
    assert "The object has now" not in detail(admin_client, row)
