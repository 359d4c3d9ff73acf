"""A history that has dropped the events of a round changes no decision about it.

It has at most forty events, and a timeout that fails or is moved often has more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import Late, Limits, clock, operations
from django_delayq.models import Timeout
from django_delayq.operations.changes import move_missed
from django_delayq.rounds.memory import MAX_EVENTS, record
from tests.integration.firing.conftest import due, fire, state
from tests.integration.operations.conftest import BY, held_for
from tests.integration.operations.names import HOUR, MINUTE, Declare
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
pytestmark.append(pytest.mark.usefixtures("controls_are_read_again"))
Unpaid = Callable[..., tuple[Order, Timeout]]


def forget(*rows: Timeout) -> None:
    """Leave of the histories of `rows` what the cap leaves after forty others, of which none means anything."""
    for row in rows or Timeout.objects.all():
        row.history = []
        for number in range(MAX_EVENTS):
            record(row, "adopted", timezone.now(), by=BY, reason=str(number))
        Timeout.objects.filter(pk=row.pk).update(history=row.history)
        row.refresh_from_db()


def fail_to_pay() -> None:
    """Let the condition of the policies of each order end, and hold again."""
    for status in ("paid", "unpaid"):
        for order in Order.objects.all():
            order.status = status
            order.save()


@pytest.fixture
def unpaid(declare: Declare) -> Unpaid:
    """Return a function that returns an order, and its timeout of an automatic policy, due in 30 minutes."""

    def create(**options: Any) -> tuple[Order, Timeout]:
        options = {"after": 30 * MINUTE, "since": "created_at", "when": Q(status="unpaid"), **options}
        policy = declare(Order, name="armed", **options)
        order = Order.objects.create(status="unpaid", created_at=timezone.now())
        return order, order.timeouts.get(policy=policy.label)

    return create


@pytest.mark.parametrize("atomic", [True, False])
def test_snoozes_are_counted(order: Order, declare: Declare, atomic: bool) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise dq.Snooze(seconds=0)

    row = due(order, declare(Order, handler, name="snoozing", atomic=atomic, limits=Limits(snoozes=2)))
    for expected in ("pending", "pending", "dead"):
        fire(row)
        assert state(row)[0] == expected
        forget(row)
    operations.retry(row, by=BY)
    forget(row)
    fire(row)
    assert state(row) == ("pending", ""), "the retry began their count again"


def test_once_knows_the_deadline_before_an_operator_moved_it(order: Order, declare: Declare) -> None:
    policy, at = declare(Order, name="single"), timezone.now() + HOUR
    row = dq.schedule_timeout(order, policy, at=at)
    operations.postpone(row, by=BY, hours=1)
    operations.fire_now(row, by=BY)
    forget(row)
    assert fire(row).fired
    assert dq.schedule_timeout(order, policy, at=at, on_conflict="once").pk == row.pk
    dq.schedule_timeouts([order], policy, at=at, on_conflict="once")
    assert Timeout.objects.get().pk == row.pk


@pytest.mark.parametrize("how", ["fire_now", "retry", "refire"])
def test_what_an_operator_wants_fired_is_not_too_late(order: Order, declare: Declare, how: str) -> None:
    row = due(order, declare(Order, lambda *_: None, name="late", late=Late(HOUR)))
    if how == "retry":
        Timeout.objects.update(state="dead", cause="late", settled_at=timezone.now(), slot_taken=None)
    elif how == "refire":
        assert fire(row).fired
    row.refresh_from_db()
    getattr(operations, how)(row, by=BY)
    row = Timeout.objects.latest("pk")
    forget(row)
    Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now() - 2 * HOUR)
    assert fire(row).fired


def test_a_hold_that_has_moved_a_round_does_not_move_it_again(unpaid: Unpaid) -> None:
    order, row = unpaid()
    dq.extend_timeout(order, row.policy, minutes=5)
    operations.hold(row.policy, by=BY)
    held_for(10 * MINUTE)
    Timeout.objects.update(created_at=timezone.now() - HOUR, since_at=timezone.now() - HOUR)
    Order.objects.update(created_at=Timeout.objects.get(pk=row.pk).since_at)
    operations.resume(row.policy, by=BY)
    row.refresh_from_db()
    moved_to = row.due_at
    forget(row)
    fail_to_pay()
    assert order.timeouts.get(state="pending", policy=row.policy).due_at == moved_to


def test_what_was_moved_by_hand_is_not_missed_by_a_change(unpaid: Unpaid) -> None:
    order, row = unpaid()
    operations.change_delay(row.policy, 45 * MINUTE, by=BY, mode="shift")
    assert order.created_at is not None
    dq.reschedule_timeout(order, row.policy, at=order.created_at + 30 * MINUTE)
    forget(row)
    with clock.set_to(timezone.now() + 2 * MINUTE):
        assert move_missed(connection.alias) == 0
    row.refresh_from_db()
    assert row.due_at == order.created_at + 30 * MINUTE
