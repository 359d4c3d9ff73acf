"""After `cancel_timeout` has returned True, the round of the object's present `since` is not armed any more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import TableSync
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.seen import sql_of
from tests.testapp.models import Order

Declare = Callable[..., dq.TimeoutPolicy[Any]]
pytestmark = pytest.mark.django_db(transaction=True)
HALF_HOUR = timedelta(minutes=30)
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


@in_both_ways
@pytest.mark.parametrize("state", ["cancelled", "skipped"])
def test_what_was_cancelled_while_its_condition_did_not_hold_is_not_armed_again(how: str, state: str) -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    set_status(order, "paying")
    Timeout.objects.update(state=state, due_at=order.created_at + 2 * HALF_HOUR, extensions=1)  # type: ignore[operator]
    ended = Timeout.objects.get()
    assert dq.cancel_timeout(order, "cancel_unpaid", **CALLED) is True
    Order.objects.update(status="unpaid")
    arm(how, Order.objects.get())
    settled, row = Timeout.objects.order_by("id")
    assert values(settled) == values(ended), "a settled row does not change any more"
    assert (row.state, row.cause, row.reason) == CLOSED
    assert (row.due_at, row.first_due_at) == (ended.due_at, ended.first_due_at)
    story = [event.what for event in dq.explain_timeout(order, "cancel_unpaid")]
    assert story == ["scheduled", state, "scheduled", "cancelled"]


def test_an_older_round_that_its_condition_cancelled_does_not_count_as_the_present_one() -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    set_status(order, "paying")
    order.created_at = timezone.now() + timedelta(minutes=5)
    order.save()
    assert dq.cancel_timeout(order, "cancel_unpaid") is True
    set_status(order, "unpaid")
    found = order.timeouts.order_by("id").values_list("since_at", "cause")
    assert [cause for _, cause in found] == ["condition", "hand"]
    assert found[1][0] == order.created_at


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


@pytest.mark.parametrize("by_callable", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@in_both_ways
def test_the_present_round_is_closed_although_that_of_an_older_since_is_pending(
    unarmed: Order, declare: Declare, by_callable: bool, inside: bool, how: str
) -> None:
    """`since` was changed by an update, or by a change of the row that the function reads."""
    since: Any = (lambda order: order.created_at) if by_callable else "created_at"
    policy = declare(Order, name="former", after=HALF_HOUR, since=since, when=Q(status="unpaid"))
    unarmed.save()
    Order.objects.update(created_at=timezone.now() + HALF_HOUR)
    unarmed.refresh_from_db()
    with transaction.atomic() if inside else nullcontext():
        assert dq.cancel_timeout(unarmed, policy) is True
    arm(how, unarmed)
    found = unarmed.timeouts.filter(policy=policy.label).order_by("id").values_list("state", "cause", "since_at")
    assert [each[:2] for each in found] == [("cancelled", "hand")] * 2
    assert found[1][2] == unarmed.created_at


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


def test_an_error_of_the_database_passes(unarmed: Order, declare: Declare) -> None:
    def since(order: Order) -> Any:
        raise OperationalError("gone")

    policy = declare(Order, name="fails", after=HALF_HOUR, since=since, when=Q(status="shipped"))
    with pytest.raises(OperationalError):
        dq.cancel_timeout(unarmed, policy)


def test_a_row_of_another_round_is_cancelled_alone_and_a_guard_leaves_it_to_the_condition(unarmed: Order) -> None:
    with dq.before_deadline(unarmed, "cancel_unpaid") as timeout:
        assert timeout is None
    unarmed.save()
    row = unarmed.timeouts.get()
    assert row.state == "pending", "a payment that failed: the order is still unpaid"
    set_status(unarmed, "paying")
    assert dq.cancel_timeout(row) is True
    set_status(unarmed, "unpaid")
    assert unarmed.timeouts.filter(state="pending").exists()


@pytest.mark.parametrize("since", ["created_at", lambda order: order.created_at], ids=["a column", "a function"])
@pytest.mark.parametrize("how", ["cancel", "guard"])
def test_a_fired_round_does_not_count_as_a_later_one_that_is_not_armed_yet(
    declare: Declare, since: Any, how: str
) -> None:
    """A cart was reminded, and used again by `QuerySet.update`. Its owner can pay, and is not reminded afterwards."""
    policy = declare(Order, name="idle", after=HALF_HOUR, since=since, when=Q(status="cart"))
    began = timezone.now()
    cart = Order.objects.create(status="cart", created_at=began - HALF_HOUR)
    assert fire_due(policy) == 1
    assert dq.cancel_timeout(cart, policy) is False
    Order.objects.update(created_at=began)
    if how == "cancel":
        assert dq.cancel_timeout(cart, policy) is True
        TableSync("default").run(at_once=True)
    else:
        with dq.before_deadline(cart, policy) as row:
            set_status(cart, "paid")
        assert row is None
    assert not dq.pending_timeouts(cart, policy)


def test_a_round_that_has_fired_is_too_late_although_a_newer_one_has_fired_or_its_handler_changed_since(
    declare: Declare,
) -> None:
    def expire(order: Order, timeout: Timeout) -> None:
        if order.note:
            Order.objects.filter(pk=order.pk).update(status="expired", created_at=timezone.now())

    policy = declare(Order, expire, name="idle", after=HALF_HOUR, since="created_at", when=Q(status="cart"))
    began = timezone.now()
    cart = Order.objects.create(status="cart", created_at=began - 2 * HALF_HOUR)
    assert fire_due(policy) == 1
    cart.created_at = began - HALF_HOUR
    cart.save()
    assert fire_due(policy) == 1
    Order.objects.update(created_at=began - 2 * HALF_HOUR)
    assert dq.cancel_timeout(cart, policy) is False
    other = Order.objects.create(status="cart", note="changes", created_at=began - HALF_HOUR)
    assert fire_due(policy) == 1
    assert dq.cancel_timeout(other, policy) is False
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(other, policy):
        pytest.fail("the block ran")
