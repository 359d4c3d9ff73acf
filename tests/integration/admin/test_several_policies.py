"""The page of policies operates on several of them: the selected ones or all, after one confirmation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import get_policies, operations
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl
from tests.integration.admin.test_policies import LIST, page, told

pytestmark = pytest.mark.django_db(transaction=True)

REMIND, LINGER, UNPAID = "testapp.order.remind", "testapp.order.linger", "testapp.order.cancel_unpaid"
NAMES = ("pause", "hold", "resume")
CONFIRMED = {"reason": "a storm", "confirmed": "yes", "shift": "on"}
Staff = Callable[..., Client]


@pytest.fixture(autouse=True)
def as_in_a_new_process(controls_are_read_again: None) -> None:
    """Use the fixture for every test of this module."""


def address(operation: str, query: str = "") -> str:
    return f"{reverse('admin:django_delayq_policycontrol_operate_selected', args=[operation])}{query}"


def stops() -> dict[str, str]:
    return {each.label: each.stop for each in controls.policy_states("default") if each.stop}


@pytest.mark.parametrize(("operation", "stop"), [("pause", "paused"), ("hold", "held")])
def test_the_selected_policies_stop_until_a_time_and_are_resumed(
    admin_client: Client, operation: str, stop: str
) -> None:
    until = timezone.localtime() + timedelta(hours=1)
    shown = admin_client.get(address(operation, f"?policy={REMIND}&policy={LINGER}"))
    text = shown.content.decode()
    assert REMIND in text and LINGER in text and UNPAID not in text and "2 policies" in text
    assert not stops()
    fields = {**CONFIRMED, "policy": [REMIND, LINGER], "until": until.strftime("%Y-%m-%dT%H:%M")}
    answer = admin_client.post(address(operation), fields)
    assert answer.status_code == 302 and answer.url == reverse(LIST)  # type: ignore[attr-defined]
    assert stops() == {REMIND: stop, LINGER: stop}
    assert len(told(answer)) == 2 == LogEntry.objects.count()
    assert None not in PolicyControl.objects.values_list("until", flat=True)
    assert set(PolicyChange.objects.values_list("by", "reason")) == {("admin:admin", "a storm")}
    admin_client.post(address("resume"), {**CONFIRMED, "policy": [REMIND, LINGER]})
    assert not stops()


def test_all_policies_stop_but_what_is_stopped_for_longer_is_left_alone(admin_client: Client) -> None:
    operations.pause(REMIND, by="admin:alice", reason="wrong price list")
    operations.hold(LINGER, by="admin:alice", until=timezone.now() + timedelta(minutes=5))
    shown = admin_client.get(address("pause", "?all=1"))
    labels = [each["label"] for each in shown.context["policies"]]
    assert labels == sorted(policy.label for policy in get_policies())
    until = (timezone.localtime() + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    answer = admin_client.post(address("pause"), {**CONFIRMED, "policy": labels, "until": until})
    assert PolicyControl.objects.get(policy=REMIND).reason == "wrong price list"
    assert f"“{REMIND}” is left as it is, because it is stopped for longer." in told(answer)
    assert f"{LINGER} is on hold: resume it first." in told(answer)
    assert len(stops()) == len(labels)


@pytest.mark.parametrize("operation", NAMES)
def test_without_its_permission_nothing_is_offered_and_nothing_is_done(staff: Staff, operation: str) -> None:
    for client in (staff("view_policycontrol", "change_policy_guards"), staff("pause_policy")):
        assert client.get(address(operation, "?all=1")).status_code == 403
        assert client.post(address(operation), {**CONFIRMED, "policy": REMIND}).status_code == 403
        assert client.get(address(operation)).status_code == 403
    assert not PolicyChange.objects.exists()
    assert address(operation) not in page(staff("view_policycontrol"))
    assert address(operation) in page(staff("view_policycontrol", "pause_policy"))


def test_without_a_confirmation_a_reason_or_a_policy_nothing_is_done(admin_client: Client) -> None:
    assert told(admin_client.get(address("pause"))) == ["Select policies first."]
    assert told(admin_client.post(address("pause"), {**CONFIRMED, "policy": "no.such.policy"}))
    for fields in ({"policy": REMIND}, {"policy": REMIND, "reason": "x", "until": "2020-01-01T10:00"}):
        answer: Any = admin_client.post(address("pause"), fields)
        assert answer.status_code == 200 and "errorlist" in answer.content.decode()
        assert f'name="policy" value="{REMIND}"' in answer.content.decode()
    for operation in ("delay", "brake", "explode"):
        assert admin_client.get(address(operation, "?all=1")).status_code == 404
    assert not PolicyChange.objects.exists()
