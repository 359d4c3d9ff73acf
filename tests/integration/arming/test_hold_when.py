"""`hold_when`: rounds with a key, whole tables and bulk writes, and calls by hand while the condition holds."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq.arming.sync import Synced, sync_policy
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.hours import (
    HOUR,
    T0,
    Declare,
    again,
    at,
    hours,
    save,
    seen,
    talking,  # noqa: F401 - a fixture
    update_and_sync,
)
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


def only(policy: Any, **where: Any) -> Timeout:
    return Timeout.objects.filter(policy=policy.label, **where).latest("pk")


@pytest.mark.parametrize("change", [save, update_and_sync])
@pytest.mark.parametrize("policy", ["column", "function"], indirect=True)
def test_rounds_with_a_key_follow_the_condition_too(policy: Any, change: Any) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
        keyed = dq.schedule_timeout(order, policy, key="part", hours=9)
        by_hand = dq.schedule_timeout(order, policy, key="other", hours=9)
        dq.hold_timeout(by_hand)
    with at(1):
        change(order, note="talks")
    assert (seen(again(keyed)), seen(only(policy, key=""))) == ("held 8", "held 3")
    assert dq.schedule_timeout(order, policy, key="new", hours=1).state == "held"
    with at(2):
        change(order, note="")
    assert (seen(again(keyed)), again(by_hand).state, only(policy, key="new").state) == (
        "pending 10",
        "held",
        "pending",
    )
    with at(3):
        assert sync_policy(policy, "default") == Synced()
    Order.objects.update(note="talks")
    with at(20):
        fire_due(policy)
    assert again(keyed).state == "held"
    with at(21):
        change(order, note="")
        fire_due(policy)
    assert again(keyed).state == "fired"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("delay", "left"), [({}, 4), ({"hours": 7}, 7), ({"at": T0 + 5 * HOUR}, 3)])
@pytest.mark.parametrize("policy", ["column", "function after"], indirect=True)
def test_scheduling_by_hand_is_held_while_the_condition_holds(
    policy: Any, many: bool, delay: dict[str, Any], left: float
) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0, note="talks")
    assert seen(only(policy)) == "held 4"
    with at(2):
        if many:
            assert dq.schedule_timeouts([order], policy, **delay) == 1
        else:
            assert dq.schedule_timeout(order, policy, **delay).state == "held"
    assert seen(only(policy)) == f"held {left}"
    with at(3):
        save(order, note="")
    assert hours(only(policy).run_at) == 3 + left


def test_a_strict_guard_treats_a_stopped_clock_as_not_passed(policy: Any) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    Order.objects.update(note="talks")  # not noticed
    with at(5), dq.before_deadline(order, policy, strict=True) as row:
        assert row is not None


AUTOMATIC: dict[str, Any] = {"after": HOUR, "since": "created_at", "when": Q(status="unpaid")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**AUTOMATIC, "hold_when": "status"}, "hold_when must be a Q, not of type str"),
        ({**AUTOMATIC, "hold_when": Q()}, "would hold every timeout"),
        ({"after": HOUR, "hold_when": Q(note="talks")}, "hold_when needs when and since"),
        ({**AUTOMATIC, "hold_when": Q(nothing=1)}, "its hold_when does not fit"),
        ({**AUTOMATIC, "hold_when": Q(note__in=iter([]))}, "its hold_when is an iterator without items"),
    ],
)
def test_a_wrong_hold_when_is_refused(declare: Declare, options: dict[str, Any], words: str) -> None:
    with pytest.raises(dq.PolicyError, match=words):
        declare(Order, name="wrong", **options)
