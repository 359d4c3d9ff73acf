"""The page that changes deadlines shows first how many would be due at once, and how many are left unchanged."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq.models import Timeout
from tests.integration.admin.conftest import LIST
from tests.integration.admin.test_actions import address, form, make, told

pytestmark = pytest.mark.django_db
MINUTES_90 = {"amount": "90", "unit": "minutes", "direction": "earlier"}


def shown(answer: Any) -> str:
    assert answer.status_code == 200
    text: str = answer.content.decode()
    return text


def asked(rows: list[Timeout], **fields: Any) -> dict[str, Any]:
    """Return the form as it is sent before the consequences are confirmed."""
    return {name: value for name, value in form(rows, **fields).items() if name != "confirmed"}


def test_the_consequences_come_first_and_then_the_deadlines_move(admin_client: Client) -> None:
    rows = [*make(count=2), *make("dead")]
    Timeout.objects.filter(pk=rows[1].pk).update(due_at=timezone.now() + timedelta(hours=9))
    text = shown(admin_client.post(address("reschedule"), asked(rows, **MINUTES_90)))
    assert "2 deadlines will change." in text and "1 is due and fires now." in text
    assert "1 of them will be left unchanged: dead: retry instead" in text
    assert 'name="confirmed"' in text and 'type="hidden" name="amount" value="90"' in text
    assert not any(row.history for row in Timeout.objects.all())
    text = shown(admin_client.post(address("reschedule"), asked(rows, **MINUTES_90, again="x")))
    assert 'name="confirmed"' not in text
    answer = admin_client.post(address("reschedule"), form(rows, **MINUTES_90))
    assert told(answer)[0] == "2 deadlines were changed."
    assert Timeout.objects.get(pk=rows[0].pk).due_at <= timezone.now()
    assert Timeout.objects.get(pk=rows[1].pk).due_at > timezone.now() + timedelta(hours=7)


def test_one_deadline_moves_to_a_time_which_may_be_earlier(admin_client: Client) -> None:
    (row,) = make()
    moment = timezone.localtime() + timedelta(minutes=20)
    fields = {"amount": "", "at": f"{moment:%Y-%m-%dT%H:%M}"}
    assert "1 deadline will change." in shown(admin_client.post(address("reschedule"), asked([row], **fields)))
    admin_client.post(address("reschedule"), form([row], **fields))
    assert Timeout.objects.get().due_at < row.due_at


def test_it_is_among_the_actions_of_the_list(admin_client: Client) -> None:
    (row,) = make()
    page = admin_client.post(reverse(LIST), {"action": "reschedule_timeouts", "_selected_action": row.pk})
    assert "Change the deadlines of these timeouts?" in shown(page)
