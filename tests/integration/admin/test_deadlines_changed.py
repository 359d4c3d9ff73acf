"""The page that changes deadlines shows first how many would be due at once, and how many are left unchanged."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq.models import Timeout
from tests.integration.admin.conftest import LIST, stored
from tests.integration.admin.test_actions import address, form, make, told

pytestmark = pytest.mark.django_db
MINUTES_90 = {"amount": "90", "unit": "minutes", "direction": "earlier"}


def shown(answer: Any) -> str:
    assert answer.status_code == 200
    text: str = answer.content.decode()
    return text


@pytest.mark.parametrize("permission", ["postpone_timeout", "cancel_timeout"])
def test_it_needs_the_permission_to_postpone(staff: Callable[..., Client], permission: str) -> None:
    (row,) = make()
    answer = staff("view_timeout", permission).get(f"{address('reschedule')}?ids={row.pk}")
    assert answer.status_code == (200 if permission == "postpone_timeout" else 403)


def test_the_consequences_come_first_and_then_the_deadlines_move(admin_client: Client) -> None:
    rows = [*make(count=2), *make("dead")]
    Timeout.objects.filter(pk=rows[1].pk).update(due_at=timezone.now() + timedelta(hours=9))
    text = shown(admin_client.post(address("reschedule"), form(rows, **MINUTES_90)))
    assert "2 deadlines will change." in text and "1 of them would be due immediately." in text
    assert "1 of them will be left unchanged: dead: retry instead" in text
    assert 'name="previewed"' in text and 'type="hidden" name="amount" value="90"' in text
    assert not any(row.history for row in Timeout.objects.all())
    text = shown(admin_client.post(address("reschedule"), form(rows, **MINUTES_90, again="x")))
    assert 'name="previewed"' not in text
    answer = admin_client.post(address("reschedule"), form(rows, **MINUTES_90, previewed="x"))
    assert told(answer)[0] == "2 deadlines were changed."
    assert Timeout.objects.get(pk=rows[0].pk).due_at <= timezone.now()
    assert Timeout.objects.get(pk=rows[1].pk).due_at > timezone.now() + timedelta(hours=7)


def test_one_deadline_moves_to_a_time_which_may_be_earlier(admin_client: Client) -> None:
    (row,) = make()
    moment = timezone.localtime() + timedelta(minutes=20)
    fields = {"amount": "", "at": f"{moment:%Y-%m-%dT%H:%M}"}
    assert "1 deadline will change." in shown(admin_client.post(address("reschedule"), form([row], **fields)))
    admin_client.post(address("reschedule"), form([row], **fields, previewed="x"))
    assert Timeout.objects.get().due_at < row.due_at


def test_it_is_among_the_actions_of_the_list(admin_client: Client) -> None:
    (row,) = make()
    page = admin_client.post(reverse(LIST), {"action": "reschedule_timeouts", "_selected_action": row.pk})
    assert "Change the deadlines of these timeouts?" in shown(page)


@pytest.mark.parametrize(
    "fields", [{"amount": ""}, {**MINUTES_90, "at": "2030-01-01T10:00"}, {**MINUTES_90, "reason": ""}]
)
def test_a_form_that_is_incomplete_changes_nothing(admin_client: Client, fields: dict[str, Any]) -> None:
    (row,) = make()
    before = stored()
    for previewed in ({}, {"previewed": "x"}):
        assert "errorlist" in shown(admin_client.post(address("reschedule"), {**form([row]), **fields, **previewed}))
    assert stored() == before
