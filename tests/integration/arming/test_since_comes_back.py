"""`since` is changed, and changed back to the value of a round that has ended or is firing: that round counts again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.testing import fire_due
from tests.testapp.models import Order

if TYPE_CHECKING:
    from django_delayq import TimeoutPolicy
    from django_delayq.models import Timeout

Declare = Callable[..., "TimeoutPolicy[Any]"]
pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)


def idle(declare: Declare, handler: Callable[..., Any] = lambda cart, timeout: None, **options: Any) -> Any:
    return declare(Order, handler, name="idle", after=HOUR, since="created_at", when=Q(status="cart"), **options)


@pytest.fixture
def cart() -> Order:
    """A cart that was last used two hours ago."""
    return Order(status="cart", created_at=timezone.now() - 2 * HOUR)


def change_and_change_back(cart: Order) -> None:
    before = cart.created_at
    for cart.created_at in (timezone.now(), before):
        cart.save()


def states(cart: Order) -> list[tuple[str, str]]:
    return list(cart.timeouts.order_by("id").values_list("state", "cause"))


@pytest.mark.parametrize("by_row", [False, True])
def test_a_round_that_has_fired_is_too_late_to_be_cancelled(declare: Declare, cart: Order, by_row: bool) -> None:
    policy = idle(declare)
    cart.save()
    assert fire_due(policy) == 1
    change_and_change_back(cart)
    assert states(cart) == [("fired", "due"), ("cancelled", "superseded")]
    assert dq.cancel_timeout(cart, policy) is False
    with pytest.raises(dq.DeadlinePassed) as passed, dq.before_deadline(cart, policy):
        pytest.fail("ran")
    fired, superseded = cart.timeouts.order_by("id")
    assert passed.value.timeout == fired
    if by_row:
        assert [dq.cancel_timeout(row) for row in (fired, superseded)] == [False, True]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_firing_that_fails_is_retried_or_ends_as_its_cancel_wants(
    declare: Declare, cart: Order, cancelled: bool
) -> None:
    answers: list[bool] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        if timeout.attempts == 1:
            change_and_change_back(Order.objects.get())
            if cancelled:
                answers.append(dq.cancel_timeout(obj, "idle"))
            raise ValueError

    policy = idle(declare, handler, atomic=False, retry=dq.Retry([0]))
    cart.save()
    assert fire_due(policy, raises=False) == (0 if cancelled else 1)
    assert states(cart) == [("cancelled", "hand") if cancelled else ("fired", "due"), ("cancelled", "superseded")]
    assert answers == ([False] if cancelled else [])


@pytest.mark.parametrize("way", ["cancel", "retry"])
def test_a_dead_round_can_be_cancelled_or_retried(declare: Declare, cart: Order, way: str) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise dq.GiveUp("no")

    policy = idle(declare, handler)
    cart.save()
    fire_due(policy)
    change_and_change_back(cart)
    if way == "cancel":
        assert dq.cancel_timeout(cart, policy) is True
    else:
        assert operations.retry(cart.timeouts.filter(state="dead"), by="ana").changed == 1
    ended = ("cancelled", "hand") if way == "cancel" else ("pending", "")
    assert states(cart) == [ended, ("cancelled", "superseded")]
