"""`django_delayq.testing.fire_due`: everything due, inline, in due order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import clock
from django_delayq.firing import running
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.integration.firing.conftest import state
from tests.testapp.models import Effect, Order

Declare = Callable[..., dq.TimeoutPolicy[Any]]
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.mark.django_db
def test_inside_a_test_case_it_fires_what_is_due_by_the_clock(order: Order) -> None:
    with clock.set_to(NOON):
        dq.schedule_timeout(order, "cancel_unpaid", minutes=30)
        assert fire_due() == 0
    with clock.set_to(NOON + timedelta(minutes=30)):
        assert fire_due() == 1
        assert fire_due() == 0
    order.refresh_from_db()
    assert order.status == "cancelled"


@pytest.mark.django_db
def test_a_failure_inside_a_test_case_undoes_the_handler_alone(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="undone", object_id="x")
        raise ValueError

    policy = declare(Order, handler, name="fails", retry=dq.Retry([60]))
    row = dq.schedule_timeout(order, policy, seconds=0)
    assert fire_due(raises=False) == 0
    assert (state(row), row.attempts, Effect.objects.count()) == (("pending", ""), 1, 0)


@pytest.mark.django_db(transaction=True)
def test_due_order_holds_across_policies_and_for_what_a_firing_schedules(declare: Declare) -> None:
    ran: list[str] = []
    orders = [Order.objects.create() for _ in range(4)]

    def first(obj: Order, timeout: Timeout) -> None:
        ran.append(f"first {timeout.key}")
        if timeout.key == "a":
            dq.schedule_timeout(orders[3], "second", at=NOON + timedelta(minutes=3), key="d")

    declare(Order, first, name="first")
    declare(Order, lambda obj, timeout: ran.append(f"second {timeout.key}"), name="second")
    with clock.set_to(NOON):
        dq.schedule_timeout(orders[2], "first", minutes=5, key="c")
        dq.schedule_timeout(orders[1], "second", minutes=2, key="b")
        dq.schedule_timeout(orders[0], "first", minutes=1, key="a")
    with clock.set_to(NOON + timedelta(minutes=2, seconds=30)):
        assert fire_due() == 2
    assert ran == ["first a", "second b"]
    with clock.set_to(NOON + timedelta(hours=1)):
        fire_due()
    assert ran == ["first a", "second b", "second d", "first c"]


@pytest.mark.django_db(transaction=True)
def test_retries_that_are_due_at_once_are_fired_too_and_nothing_goes_on_for_ever(
    order: Order, declare: Declare
) -> None:
    calls: list[str] = []

    def fails(obj: Order, timeout: Timeout) -> None:
        calls.append("fails")
        raise ValueError

    def snoozes(obj: Order, timeout: Timeout) -> None:
        calls.append("snoozes")
        raise dq.Snooze(seconds=0)

    policies = [
        declare(Order, fails, name="fails", retry=dq.Retry([0, 0, 60])),
        declare(Order, snoozes, name="snoozes"),
        declare(Order, name="undeclared"),
    ]
    with clock.set_to(NOON):
        for policy in policies:
            dq.schedule_timeout(order, policy, seconds=0)
        registry.remove(policies[2])
        assert fire_due(raises=False) == 0
    assert calls.count("fails") == 3
    assert calls.count("snoozes") == 1
    assert Timeout.objects.pending().count() == 3


@pytest.mark.django_db(transaction=True)
def test_batches_come_together_and_the_limit_is_kept(orders: list[Order], declare: Declare) -> None:
    sizes: list[int] = []
    policy = declare(Order, lambda queryset, timeouts: sizes.append(len(timeouts)), name="batch", batch=3, when=Q())
    with clock.set_to(NOON):
        for order in orders:
            dq.schedule_timeout(order, policy, seconds=0)
        assert fire_due(limit=2) == 2
        assert fire_due(limit=0) == 0
        assert fire_due() == 3
    assert sizes == [2, 3]


@pytest.mark.django_db(transaction=True)
def test_dead_attempts_of_outside_policies_are_settled_first(order: Order) -> None:
    with clock.set_to(NOON):
        row = dq.schedule_timeout(order, "send_outside", seconds=0)
        Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=NOON + timedelta(minutes=1))
        assert fire_due() == 0
    with clock.set_to(NOON + timedelta(minutes=1)):
        assert fire_due() == 1
    assert (state(row), row.attempts) == (("fired", "due"), 1)


@pytest.mark.django_db(transaction=True)
def test_a_timeout_that_snoozes_is_tried_once_whatever_failed_before(order: Order, declare: Declare) -> None:
    calls: list[str] = []

    def snoozes(obj: Order, timeout: Timeout) -> None:
        calls.append("snoozes")
        raise dq.Snooze(seconds=0)

    policy = declare(Order, snoozes, name="snoozes")
    with clock.set_to(NOON):
        dq.schedule_timeout(order, policy, seconds=0)
        Timeout.objects.update(attempts=2)
        assert fire_due() == 0
    assert calls == ["snoozes"]


@pytest.mark.django_db(transaction=True)
def test_members_of_a_batch_that_failed_are_all_fired_however_long_that_takes(
    orders: list[Order], declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker releases those that it has no time for, so that others may fire them. Here there are no others."""
    monkeypatch.setattr(running, "WORK_SECONDS", -1.0)
    sizes: list[int] = []

    def handler(objects: Any, timeouts: list[Timeout]) -> None:
        sizes.append(len(timeouts))
        if len(timeouts) > 1:
            raise ValueError("one of them is wrong")

    policy = declare(Order, handler, name="batch", batch=5)
    with clock.set_to(NOON):
        for order in orders:
            dq.schedule_timeout(order, policy, seconds=0)
        assert fire_due() == 5
    assert not Timeout.objects.pending().exists()
