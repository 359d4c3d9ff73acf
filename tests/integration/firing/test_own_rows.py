"""A handler may change the ledger from inside: its own row is settled by then, and its slot is free."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, state
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]


def test_a_handler_schedules_the_next_round_of_its_own_policy(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        dq.schedule_timeout(obj, "rounds", minutes=5, payload={"round": (timeout.payload or {})["round"] + 1})

    row = due(order, declare(Order, handler, name="rounds"), payload={"round": 1})
    assert fire(row).done == (row.pk,)
    first, second = Timeout.objects.order_by("id")
    assert (first.pk, first.state, second.state, second.payload) == (row.pk, "fired", "pending", {"round": 2})


def test_a_next_round_of_a_handler_that_then_fails_is_undone(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        dq.schedule_timeout(obj, "rounds", minutes=5)
        raise ValueError

    row = due(order, declare(Order, handler, name="rounds", retry=dq.Retry([60])))
    fire(row)
    assert Timeout.objects.get().pk == row.pk
    assert (state(row), row.attempts) == (("pending", ""), 1)


def test_a_handler_that_cancels_or_moves_itself_learns_that_it_is_too_late(order: Order, declare: Declare) -> None:
    answers: list[Any] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        answers.append(dq.cancel_timeout(obj, "late"))
        answers.append(dq.reschedule_timeout(obj, "late", minutes=5))
        answers.append(dq.extend_timeout(obj, "late", minutes=5))

    row = due(order, declare(Order, handler, name="late"))
    assert fire(row).fired
    assert answers == [False, None, None]
    assert state(row) == ("fired", "due")


def test_saving_the_object_arms_and_cancels_other_policies_in_the_same_transaction(
    order: Order, declare: Declare
) -> None:
    Order.objects.update(created_at=timezone.now(), paid_at=timezone.now())
    order.refresh_from_db()
    order.save()  # arms cancel_unpaid
    declare(Order, name="follows", when=Q(status="warned"), since="paid_at", after=timedelta(days=1))

    def handler(obj: Order, timeout: Timeout) -> None:
        obj.status = "warned"
        obj.save()

    assert fire(due(order, declare(Order, handler, name="warns"))).fired
    states = {row.policy.rpartition(".")[2]: (row.state, row.cause) for row in Timeout.objects.all()}
    assert states == {
        "cancel_unpaid": ("cancelled", "condition"),
        "follows": ("pending", ""),
        "warns": ("fired", "due"),
    }


def test_a_handler_that_deletes_its_object_fires(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, lambda obj, timeout: obj.delete(), name="deletes"))
    other = due(order, "remind", key="other")
    assert fire(row).fired == (row.pk,)
    assert state(row) == ("fired", "due")
    assert state(other) == ("cancelled", "gone")
    assert not Order.objects.exists()


def test_two_timeouts_of_one_object_are_fired_one_after_the_other(order: Order, declare: Declare) -> None:
    """The first one's work decides whether the second one's condition still holds."""

    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what=timeout.key, object_id=obj.pk)
        obj.status = "done"
        obj.save()

    policy = declare(Order, handler, name="keyed", when=Q(status="unpaid"))
    rows = [due(order, policy, key=key) for key in ("a", "b", "c")]
    fire(*rows)
    assert [state(row) for row in rows] == [("fired", "due"), ("skipped", "condition"), ("skipped", "condition")]
    assert Effect.objects.get().what == "a"
