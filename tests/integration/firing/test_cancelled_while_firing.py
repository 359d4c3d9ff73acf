"""`atomic=False`: what a cancellation, or a payment, means for a handler that is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import django_delayq as dq
from django_delayq.firing import settle_expired
from django_delayq.models import Timeout
from tests.integration.firing.conftest import die_at, due, expire, fire, state
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]


def test_a_firing_that_succeeds_although_it_was_cancelled_meanwhile_has_fired(order: Order, declare: Declare) -> None:
    policy = declare(
        Order, lambda obj, timeout: dq.cancel_timeout(obj, "outside") and None, name="outside", atomic=False
    )
    row = due(order, policy)
    fire(row)
    assert state(row) == ("fired", "due")


def test_a_cancelled_firing_that_died_is_cancelled(order: Order) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    assert dq.cancel_timeout(order, "send_outside") is False
    expire(row)
    assert settle_expired("default").done == (row.pk,)
    assert state(row) == ("cancelled", "hand")


def test_a_firing_that_a_payment_came_too_late_for_is_retried(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        with pytest.raises(dq.DeadlinePassed), dq.before_deadline(obj, "outside"):
            pytest.fail("the payment was accepted")
        raise ValueError("the provider does not answer")

    row = due(order, declare(Order, handler, name="outside", atomic=False, retry=dq.Retry([0])))
    assert fire(row).again.keys() == {row.pk}
    assert (state(row), row.final_attempt) == (("pending", ""), False)
