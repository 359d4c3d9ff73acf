"""A pending round with a newer row: an operator has retried it, after `since` had come back to its value.

A dead round is not retried if a newer one was not superseded, so no other round is pending that is not the newest.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout
from tests.support.seen import heard
from tests.support.workers import states_in_order as states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)
DEAD = {"state": "dead", "cause": "retries", "slot_taken": None, "settled_at": timezone.now()}


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new", created_at=timezone.now())


def dead(order: Order, newer: str, cause: str = "hand") -> Timeout:
    """Return a dead row, with a newer one that has settled as `newer`."""
    old = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=old.pk).update(**DEAD)
    new = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=new.pk).update(**DEAD | {"state": newer, "cause": cause})
    return old


def revived(order: Order, newer: str = "cancelled") -> Timeout:
    """Return a row that is pending again, with a newer one that was superseded."""
    old = dead(order, newer, "superseded")
    assert operations.retry(old, by="ada").changed == 1
    old.refresh_from_db()
    return old


@pytest.mark.parametrize("newer", ["cancelled", "skipped", "dead", "fired"])
def test_no_clock_lets_an_operator_retry_a_round_that_a_newer_one_has_replaced(order: Order, newer: str) -> None:
    """The newer one may have been stored by a process whose clock is behind that of the database."""
    row = dead(order, newer)
    Timeout.objects.filter(pk=row.pk).update(created_at=timezone.now() + HOUR)
    assert operations.retry(row, by="ada").refusals == ((row.pk, "superseded"),)
    assert states() == ["dead", newer]


@pytest.mark.parametrize("newer", ["cancelled", "skipped"])
@pytest.mark.parametrize("way", ["cancel", "guard", "strict"])
def test_a_round_that_was_retried_is_displayed_and_cancelled_and_not_the_newer_one(
    order: Order, newer: str, way: str
) -> None:
    row = revived(order, newer)
    assert dq.get_deadline(order, "remind") == row.due_at
    for displayed in (order, Order.objects.prefetch_related("timeouts").get()):
        assert countdown_of(displayed, "remind").timeout_id == row.pk
    assert "Nothing is pending" not in str(dq.explain_timeout(order, "remind"))
    with heard("cancelled") as got:
        if way == "cancel":
            assert dq.cancel_timeout(order, "remind", reason="paid") is True
        else:
            with dq.before_deadline(order, "remind", reason="paid", strict=way == "strict") as timeout:
                assert timeout == row and timeout.state == "cancelled"
    assert states() == ["cancelled", newer]
    row.refresh_from_db()
    assert (row.cause, row.reason, got) == ("hand", "paid", [("cancelled", row)])


@pytest.mark.parametrize("newer", ["cancelled", "skipped"])
def test_a_retried_round_that_is_firing_makes_a_cancel_too_late(order: Order, newer: str) -> None:
    row = revived(order, newer)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    assert dq.cancel_timeout(order, "remind") is False
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, "remind"):
        pytest.fail("ran")
    row.refresh_from_db()
    assert row.final_attempt


def test_a_firing_whose_next_round_was_cancelled_may_be_cancelled_again(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    dq.schedule_timeout(order, "remind", hours=1)
    assert [dq.cancel_timeout(order, "remind") for _ in range(2)] == [True, True]


def test_a_strict_guard_refuses_a_retried_round_whose_deadline_has_passed(order: Order) -> None:
    row = revived(order)
    Timeout.objects.filter(pk=row.pk).update(due_at=timezone.now() - HOUR)
    with pytest.raises(dq.DeadlinePassed) as refused, dq.before_deadline(order, "remind", strict=True):
        pytest.fail("ran")
    assert refused.value.timeout == row
    assert states() == ["pending", "cancelled"]
