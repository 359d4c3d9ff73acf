"""Guard rails on the policies page, and the banner of a policy that its brake has paused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

import django_delayq as dq
from django_delayq import Brake, Late, Limits, Rate, operations
from django_delayq.firing.rails import brake as brake_rail
from django_delayq.ledger.controls import Guards
from django_delayq.models import PolicyControl
from tests.integration.admin.conftest import policy_shown
from tests.integration.admin.test_policies import FIELDS, LABEL, LIST, Staff, address, order, page, state, told
from tests.testapp.models import Order

__all__ = ["order"]
pytestmark = pytest.mark.django_db


def guards_shown(client: Client, label: str = LABEL) -> dict[str, str]:
    return dict(policy_shown(client, label)["guards"])


def test_the_guard_rails_in_force_are_shown_with_who_set_them(admin_client: Client, declare: Any) -> None:
    hour = timedelta(hours=1)
    limits = Limits(run=hour / 60, rate=Rate(20, by="status"), snoozes=3, total=hour)
    declare(Order, name="guarded", late=Late(hour), brake=Brake(500, hour / 6), shadow=True, limits=limits)
    label = "testapp.order.guarded"
    assert guards_shown(admin_client) == {}, "a policy without guard rails shows none"
    assert guards_shown(admin_client, label) == {
        "Late": "skipped if it would fire more than 1 h late (declared)",
        "Brake": "pauses after more than 500 firings in 10 min (declared)",
        "Shadow mode": "100% of the objects are skipped, and nothing fires for them (declared)",
        "Longest call": "1 min",
        "Highest rate": "20 attempts in 1 s, for each value of status",
        "Most snoozes": "3",
        "Furthest move": "1 h",
    }
    operations.late(label, after=2 * hour, then="fire", by="cli:ann")
    operations.brake(label, off=True, by="cli:<b>ob")
    operations.shadow(label, share=0, by="rest:eve")
    shown = guards_shown(admin_client, label)
    assert shown["Late"] == "fires also if it is more than 2 h late (set by cli:ann)"
    assert (shown["Brake"], shown["Shadow mode"]) == ("off (set by cli:<b>ob)", "off (set by rest:eve)")
    assert "cli:&lt;b&gt;ob" in page(admin_client)


@pytest.mark.parametrize("operation", ["late", "brake", "shadow"])
def test_the_form_of_a_guard_shows_what_is_in_force_and_switches_it_off_and_back(
    admin_client: Client, declare: Any, operation: str
) -> None:
    declare(Order, name="guarded", late=Late(timedelta(hours=6), "dead"), brake=Brake(7, timedelta(minutes=90)))
    where = address(operation, "testapp.order.guarded")
    initial = admin_client.get(where).context["form"].initial
    assert (
        initial
        == {
            "late": {"amount": 6, "unit": "hours", "then": "dead"},
            "brake": {"most": 7, "amount": 90, "unit": "minutes"},
            "shadow": {"share": 100},
        }[operation]
    )
    for setting, in_force in (("on", {operation}), ("off", {operation}), ("declared", set[str]())):
        admin_client.post(where, {"reason": "x", "confirmed": "yes", "setting": setting, **initial})
        assert {*PolicyControl.objects.get().guards} - {"by"} == in_force
        assert state("testapp.order.guarded").shadow == (100 if (operation, setting) == ("shadow", "on") else 0)
    again = admin_client.post(where, {"reason": "x", "confirmed": "yes", "setting": "declared", **initial})
    assert told(again)[-1] == "Nothing was changed."


TIMEOUTS = "admin:django_delayq_timeout_changelist"
BRAKED = f"The brake of <bdi>{LABEL}</bdi> has paused it."


def test_support_sees_why_a_policy_was_paused_by_its_brake_and_resumes_it(staff: Staff, order: Order) -> None:
    brake_rail.pause_by_brake(dq.get_policy(LABEL), Guards(brake=Brake(50, timedelta(minutes=10))), 51, "default")
    support = staff("view_policycontrol", "view_timeout", "pause_policy")
    for where in (LIST, TIMEOUTS):
        text = support.get(reverse(where)).content.decode()
        assert BRAKED in text and "By its brake: 51 timeouts fired within 10 min; the brake allows 50." in text
        assert f'<a href="{address("resume")}">Resume' in text
    assert f'<a href="{address("resume")}">Resume' not in staff("view_timeout").get(reverse(TIMEOUTS)).content.decode()
    story = str(dq.explain_timeout(order, "cancel_unpaid"))
    assert "Its policy is paused by its brake until an operator resumes it. (51 timeouts fired" in story
    support.post(address("resume"), {**FIELDS, "reason": "it was a campaign"})
    assert state().stop == ""
    for where in (LIST, TIMEOUTS):
        assert BRAKED not in support.get(reverse(where)).content.decode()


def test_a_pause_by_an_operator_is_not_shown_as_one_by_the_brake(admin_client: Client) -> None:
    operations.pause(LABEL, by="admin:ann", reason="x")
    for where in (LIST, TIMEOUTS):
        assert BRAKED not in admin_client.get(reverse(where)).content.decode()
