"""A negative `after`: due before the time that it counts from, such as an hour before an appointment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import TimeoutPolicy, clock, operations
from django_delayq.arming.sync import Synced, sync_policy
from django_delayq.models import Timeout
from django_delayq.scheduling.bulk import schedule_timeouts
from tests.testapp.models import Order

Declare = Callable[..., TimeoutPolicy[Any]]
pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
LABEL = "testapp.order.hour_before"


@pytest.fixture
def policy(declare: Declare) -> TimeoutPolicy[Any]:
    return declare(Order, name="hour_before", after=-HOUR, since="paid_at", when=Q(status="booked"))


def booked(starts_at: datetime) -> Order:
    return Order.objects.create(status="booked", paid_at=starts_at)


def distances() -> list[timedelta]:
    """How long after their `since` the pending rows are due, by id."""
    rows: Any = Timeout.objects.pending().order_by("id")
    return [row.due_at - row.since_at for row in rows]


@pytest.mark.usefixtures("policy")
def test_it_is_due_before_the_time_it_counts_from_in_every_way_to_arm_and_to_read() -> None:
    starts_at = timezone.now() + timedelta(days=2)
    saved = booked(starts_at)
    Order.objects.bulk_create([Order(status="booked", paid_at=starts_at) for _ in range(4)])
    saved_later, by_sync, by_hand, in_bulk = Order.objects.order_by("pk")[1:]
    saved_later.save()
    schedule_timeouts([in_bulk], "hour_before")
    dq.schedule_timeout(by_hand, "hour_before")
    assert sync_policy(dq.get_policy(LABEL), "default").armed == 1
    assert distances() == [-HOUR] * 5
    for order in (saved, saved_later, by_sync, by_hand, in_bulk):
        assert dq.get_deadline(order, "hour_before") == starts_at - HOUR
    found: Any = Order.objects.annotate(due=dq.Deadline("hour_before")).get(pk=saved.pk)
    assert found.due == starts_at - HOUR
    assert "It is due at" in dq.explain_timeout(saved, "hour_before").outlook
    saved.paid_at = starts_at + HOUR
    saved.save()
    assert distances() == [-HOUR] * 5
    assert sync_policy(dq.get_policy(LABEL), "default") == Synced()


def test_a_callable_may_be_negative_with_since_only(declare: Declare) -> None:
    declare(Order, name="computed", after=lambda order: -HOUR, since=lambda order: order.paid_at, when=Q(status="new"))
    declare(Order, name="by_hand", after=lambda order: -HOUR)
    order = Order.objects.create(status="new", paid_at=timezone.now() + 2 * HOUR)
    assert distances() == [-HOUR]
    with pytest.raises(dq.InvalidDelay, match="must not be negative, but is -1 h"):
        dq.schedule_timeout(order, "by_hand")


@pytest.mark.usefixtures("policy")
def test_recomputing_never_moves_a_row_without_since_before_the_call_that_scheduled_it() -> None:
    order = Order.objects.create(status="booked")
    row = dq.schedule_timeout(order, "hour_before", hours=5)
    assert operations.preview_delay(LABEL, -2 * HOUR).overdue == 0
    change = operations.change_delay(LABEL, -2 * HOUR, by="ana", mode="recompute")
    assert (change.moved, Timeout.objects.get().due_at) == (0, row.due_at)


def test_there_is_no_deadline_before_the_year_1(policy: TimeoutPolicy[Any]) -> None:
    begin = datetime(1, 1, 1, 0, 30, tzinfo=UTC)
    assert policy.due_of(None, begin) is None
    with pytest.raises(dq.InvalidDelay, match="1 h before .* too far in the past"):
        clock.shifted(begin, -HOUR)
