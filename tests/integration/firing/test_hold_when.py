"""Due timeouts whose `hold_when` holds do not fire, in each way to fire."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.hours import HOUR, T0, Declare, at, hours
from tests.support.seen import heard
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
TALKS = Q(note="talks")
KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "always": {"when": Q()},
    "together": {"together": 5},
    "batch": {"batch": 5},
    "outside": {"atomic": False},
    "related": {"hold_when": TALKS & (Q(customer=None) | Q(customer__name="any"))},
    "function": {"after": lambda order: HOUR},
    "shadow": {"shadow": True},
}


def note(target: Any, timeouts: Any) -> None:
    for timeout in timeouts if isinstance(timeouts, list) else [timeouts]:
        Effect.objects.create(what="fired", object_id=timeout.object_id, timeout_id=timeout.pk)


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, declare: Declare) -> dq.TimeoutPolicy[Any]:
    options = {"after": HOUR, "since": "created_at", "when": Q(status="unpaid"), "hold_when": TALKS}
    return declare(Order, note, name="talking", **{**options, **KINDS[request.param]})


@pytest.fixture
def orders(policy: Any) -> list[Order]:
    """Four orders whose timeouts are due; two of them are on hold, which nothing has noticed."""
    with at(0):
        orders = [Order.objects.create(created_at=T0) for _ in range(4)]
    Order.objects.filter(pk__in=[order.pk for order in orders[:2]]).update(note="talks")
    return orders


def states(policy: Any, orders: list[Order]) -> list[str]:
    rows = {row.object_id: row for row in Timeout.objects.filter(policy=policy.label)}
    return [rows[str(order.pk)].state for order in orders]


def test_what_is_on_hold_is_held_and_the_others_fire(
    policy: Any, orders: list[Order], caplog: pytest.LogCaptureFixture
) -> None:
    settled, count = ("skipped", 0) if policy.shadow else ("fired", 2)
    with heard("held") as got, at(2), caplog.at_level(logging.INFO, "django_delayq.firing"):
        fire_due(policy)
    assert states(policy, orders) == ["held", "held", settled, settled]
    assert Effect.objects.count() == count
    rows = Timeout.objects.filter(policy=policy.label, state="held").order_by("pk")
    for row in rows:
        assert (row.remaining, row.attempts, row.held_by_hand, row.cause) == (timedelta(0), 0, False, "")
        assert ([event["what"] for event in row.history], hours(row.due_at)) == (["held"], 1)
    assert sorted(timeout.pk for _, timeout in got) == [row.pk for row in rows]
    assert sum("hold_when of its policy holds" in record.message for record in caplog.records) == 2
    with at(3):
        assert not fire_due(policy)
        orders[0].note = ""
        orders[0].save()
        fire_due(policy)
        assert states(policy, orders)[:2] == [settled, "held"]
    assert hours(Timeout.objects.get(object_id=str(orders[0].pk), policy=policy.label).due_at) == 3
