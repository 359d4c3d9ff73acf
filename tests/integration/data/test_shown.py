"""People see which deadlines their policy has computed, with which values, and which were set by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db.models import Q
from django.test import Client
from django.urls import include, path, reverse
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import Working, explain_timeout
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.integration.data.conftest import MINUTE, UNPAID, Declare, bought
from tests.integration.data.test_paths import ALWAYS
from tests.testapp.market import Channel, Purchase

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]
urlpatterns = [path("", include("tests.urls")), path("", include("tests.integration.rest.urls"))]
BY_POLICY, BY_HAND = "Its deadline was computed by its policy", "Its deadline was set by hand"


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("channel__pay_within", f"{BY_POLICY} with channel__pay_within = 30 min."),
        (Working(hours="channel__hours", calendar=ALWAYS), f"{BY_POLICY} with channel__hours = 1.5."),
        (Working(hours=1, calendar=lambda obj: ALWAYS), f"{BY_POLICY}."),
        (5 * MINUTE, f"{BY_POLICY}."),
    ],
)
def test_a_story_says_with_which_values_the_deadline_was_computed(
    declare: Declare, channel: Channel, after: Any, words: str
) -> None:
    Channel.objects.update(hours="1.5")
    declare(Purchase, name="pay", after=after, **UNPAID)
    obj = bought(channel=channel)
    story = explain_timeout(obj, "pay")
    assert story.deadline == words
    assert str(story).splitlines()[-2].strip() == words
    dq.extend_timeout(obj, "pay", minutes=5)
    assert explain_timeout(obj, "pay").deadline.startswith(BY_HAND)
    dq.cancel_timeout(obj, "pay")
    assert explain_timeout(obj, "pay").deadline == ""


def test_the_values_of_a_former_declaration_are_not_taken_for_those_of_the_present_one(declare: Declare) -> None:
    policy = declare(Purchase, name="pay", after="grace", **UNPAID)
    obj = bought(grace=20 * MINUTE)
    registry.remove(policy)
    declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    assert explain_timeout(obj, "pay").deadline == f"{BY_POLICY}."


def test_commands_admin_and_rest_show_who_has_set_the_deadline(
    declare: Declare, channel: Channel, admin_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(Purchase, name="pay", after="channel__pay_within", since="created_at", when=Q(status="unpaid"))
    computed, by_hand = bought(channel=channel), bought(channel=channel)
    dq.reschedule_timeout(by_hand, "pay", minutes=90)
    call_command("delayq_list", policy="testapp.purchase.pay", json=True)
    listed = {row["object_id"]: row["is_computed"] for row in json.loads(capsys.readouterr().out)}
    assert listed == {str(computed.pk): True, str(by_hand.pk): False}
    call_command("delayq_list", policy="testapp.purchase.pay")
    lines = capsys.readouterr().out.splitlines()
    assert "set by" in lines[0] and [" hand" in line for line in lines[1:]] == [False, True]
    call_command("delayq_explain", "testapp.purchase", str(computed.pk))
    assert f"{BY_POLICY} with channel__pay_within = 30 min." in capsys.readouterr().out
    changelist = reverse("admin:django_delayq_timeout_changelist")
    for who, obj in (("policy", computed), ("hand", by_hand)):
        result = admin_client.get(changelist, {"set_by": who}).context["cl"].result_list
        assert [row.object_id for row in result] == [str(obj.pk)]
        page = admin_client.get(reverse("admin:django_delayq_timeout_change", args=[result[0].pk])).content.decode()
        assert f'<div class="readonly">{who}</div>' in page
        assert (BY_POLICY if who == "policy" else BY_HAND) in page
    api = APIClient()
    api.force_login(User.objects.get(username="admin"))
    for row in Timeout.objects.all():
        answer = api.get(f"/api/timeouts/{row.pk}/").json()
        assert answer["is_computed"] == row.is_computed
        assert answer["story"]["deadline"] == explain_timeout(row).deadline
