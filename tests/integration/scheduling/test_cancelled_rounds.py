"""What `cancel_timeout` closes: the round of the present `since`, though not armed yet, or one that was retried."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.arming.sync import TableSync
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout
from tests.support.seen import heard, sql_of
from tests.support.workers import states_in_order as states
from tests.testapp.models import Order

Declare = Callable[..., dq.TimeoutPolicy[Any]]
pytestmark = pytest.mark.django_db(transaction=True)
HALF_HOUR, HOUR = timedelta(minutes=30), timedelta(hours=1)
DEAD = {"state": "dead", "cause": "retries", "slot_taken": None, "settled_at": timezone.now()}
CALLED = {"reason": "the customer called"}
CLOSED = ("cancelled", "hand", "the customer called")
in_both_ways = pytest.mark.parametrize("how", ["save", "sync"])


@pytest.fixture
def unarmed() -> Order:
    """An order that is not armed yet, as after `bulk_create`, or if a process died between save and arming."""
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
    return Order.objects.get()


def arm(how: str, order: Order) -> None:
    if how == "save":
        order.save()
    else:
        TableSync("default").run(at_once=True)


def set_status(order: Order, status: str) -> None:
    order.status = status
    order.save()


def values(row: Timeout) -> dict[str, Any]:
    return vars(row) | {"_state": None}


@in_both_ways
def test_what_was_cancelled_before_it_was_armed_is_not_armed(unarmed: Order, how: str) -> None:
    assert dq.cancel_timeout(unarmed, "cancel_unpaid", **CALLED) is True
    before = values(unarmed.timeouts.get())
    sent = sql_of(lambda: dq.cancel_timeout(unarmed, "cancel_unpaid", reason="again"))
    assert not [sql for sql in sent if sql.startswith("INSERT")]
    arm(how, unarmed)
    row, since = unarmed.timeouts.get(), unarmed.created_at
    assert values(row) == before
    assert (row.state, row.cause, row.reason) == CLOSED
    assert (row.since_at, row.due_at) == (since, since + HALF_HOUR)  # type: ignore[operator]


def test_only_the_automatic_round_of_an_object_with_a_deadline_is_closed(unarmed: Order, declare: Declare) -> None:
    """Nothing is written for a key, a policy without `since`, or an object without its value, or that is gone."""
    exempt = declare(Order, name="exempt", after=lambda order: None, since="created_at", when=Q(status="unpaid"))
    for policy, key in (("remind", ""), ("cancel_unpaid", "another"), (exempt, "")):
        assert dq.cancel_timeout(unarmed, policy, key=key) is True
    Order.objects.update(created_at=None)
    assert dq.cancel_timeout(unarmed, "cancel_unpaid") is True
    Order.objects.all()._raw_delete("default")
    assert dq.cancel_timeout(unarmed, "cancel_unpaid") is True
    assert not Timeout.objects.exists()


@pytest.mark.parametrize("wrong", ["raises", "beyond the calendar"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_object_whose_deadline_cannot_be_computed_can_be_cancelled_and_paid(
    unarmed: Order, declare: Declare, caplog: pytest.LogCaptureFixture, wrong: str, asynchronous: bool
) -> None:
    """It does not match the condition, so that saving it never asks."""

    def since(order: Order) -> Any:
        return order.customer.created_at if wrong == "raises" else datetime(9999, 12, 31, tzinfo=UTC)  # type: ignore[union-attr]

    policy = declare(Order, name="fails", after=HALF_HOUR, since=since, when=Q(status="shipped"))
    unarmed.save()
    cancel = async_to_sync(dq.acancel_timeout) if asynchronous else dq.cancel_timeout
    with transaction.atomic():
        assert cancel(unarmed, policy) is True
        set_status(unarmed, "paid")
    unarmed.refresh_from_db()
    assert unarmed.status == "paid"
    records: list[Any] = [each for each in caplog.records if getattr(each, "event", "") == "close_failed"]
    assert len(records) == (wrong == "raises"), "beyond the calendar there is no round to close"
    for record in records:
        assert (record.policy, record.object_id) == (policy.label, str(unarmed.pk))
        assert record.exc_info


# A pending round with a newer row: an operator has retried it, after `since` had come back to its value. A dead round
# is not retried if a newer one was not superseded, so no other round is pending that is not the newest.


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


def test_a_firing_whose_next_round_was_cancelled_may_be_cancelled_again(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    dq.schedule_timeout(order, "remind", hours=1)
    assert [dq.cancel_timeout(order, "remind") for _ in range(2)] == [True, True]
