"""What others may do while a step runs outside a transaction: pay, cancel, schedule again, stop the clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq.firing import settle_expired
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.steps.days import DAY, Declare, at, dunning, note, planned, ran, row_of, sent
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def during(declare: Declare, act: Callable[[Order, Any], None], **options: Any) -> tuple[Any, Order]:
    """Fire a step outside a transaction, which does `act` as another process would; return policy and invoice."""
    policy = dunning(declare, **options)

    def early(obj: Order, timeout: Timeout) -> None:
        assert row_of(obj).state == "firing"
        note(obj, timeout)
        act(Order.objects.get(pk=obj.pk), policy)

    policy.step(-5 * DAY, atomic=False, name="early")(early)
    with at(0):
        order = sent()
    with at(9):
        fire_due(policy, order)
    return policy, order


def finish(policy: Any, order: Order) -> None:
    for day in (11, 14, 15, 16, 17, 40):
        with at(day):
            fire_due(policy, order)


def test_a_cancel_is_in_time_and_nothing_follows(declare: Declare) -> None:
    results = list[bool]()
    policy, order = during(declare, lambda obj, policy: results.append(dq.cancel_timeout(obj, policy, reason="paid")))
    assert results == [True]
    row = row_of(order)
    assert (row.state, row.cause) == ("cancelled", "hand")
    finish(policy, order)
    assert ran() == ["early"]


def test_a_payment_is_in_time_and_nothing_follows(declare: Declare) -> None:
    def pay(obj: Order, policy: Any) -> None:
        with dq.before_deadline(obj, policy):
            obj.status = "paid"
            obj.save()

    policy, order = during(declare, pay)
    assert row_of(order).state == "cancelled"
    finish(policy, order)
    assert ran() == ["early"]


def test_a_save_that_pays_ends_the_round_before_the_next_step(declare: Declare) -> None:
    def pay(obj: Order, _policy: Any) -> None:
        obj.status = "paid"
        obj.save()

    policy, order = during(declare, pay)
    finish(policy, order)
    assert ran() == ["early"]
    assert (row_of(order).state, row_of(order).cause) == ("skipped", "condition")


def test_scheduling_again_begins_a_round_that_replaces_it(declare: Declare) -> None:
    def again(obj: Order, policy: Any) -> None:
        if not Timeout.objects.filter(policy=policy.label, state="pending").exists():
            dq.schedule_timeout(obj, policy, days=14)

    policy, order = during(declare, again)
    old, new = Timeout.objects.filter(policy=policy.label).order_by("id")
    assert (old.state, old.cause, new.state) == ("skipped", "superseded", "pending")
    assert planned(order) == ("early", 18, 23)
    assert ran() == ["early"]


def test_an_expired_step_that_returns_late_is_not_called_again(declare: Declare) -> None:
    def expire(obj: Order, _policy: Any) -> None:
        with at(9 + timedelta(hours=1) / DAY):
            settle_expired("default")
        assert row_of(obj).state == "pending"

    policy, order = during(declare, expire)
    assert planned(order) == ("friendly", 11, 14)
    finish(policy, order)
    assert ran() == ["early", "friendly", "firm:1", "firm:2", "firm:3", "handler"]
