"""`Limits(total=...)`: how far the application may move a deadline from its first one, by whichever verb."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.models import Timeout
from tests.support.seen import sql_of
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    return declare(Order, name="bounded", limits=dq.Limits(total=2 * HOUR))


@pytest.fixture
def now() -> datetime:
    return timezone.now()


VERBS: dict[str, Callable[[Order, Any, datetime], Any]] = {
    "schedule": lambda order, policy, at: dq.schedule_timeout(order, policy, at=at),
    "async": lambda order, policy, at: async_to_sync(dq.aschedule_timeout)(order, policy, at=at),
    "schedule many": lambda order, policy, at: dq.schedule_timeouts([order], policy, at=at),
    "many, once": lambda order, policy, at: dq.schedule_timeouts([order], policy, at=at, on_conflict="once"),
    "reschedule": lambda order, policy, at: dq.reschedule_timeout(order, policy, at=at),
    "extend": lambda order, policy, at: dq.extend_timeout(
        order, policy, after=at - (dq.get_deadline(order, policy) or at)
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_moves_a_deadline_up_to_the_total_and_not_beyond(
    order: Order, policy: dq.TimeoutPolicy[Any], now: datetime, verb: str
) -> None:
    first = dq.schedule_timeout(order, policy, at=now + HOUR)
    for _ in range(2):
        VERBS[verb](order, policy, now + 3 * HOUR)
    before = Timeout.objects.get()
    assert (before.first_due_at, before.due_at) == (first.due_at, now + 3 * HOUR)
    with transaction.atomic():
        with pytest.raises(dq.ExtensionLimit, match=r"Limits\(total=2 h\)") as refused:
            VERBS[verb](order, policy, now + 3 * HOUR + MINUTE)
        assert refused.value.timeout == before
        assert Timeout.objects.filter(pk=before.pk, due_at=before.due_at, history=before.history).exists()
    VERBS["reschedule"](order, policy, now + HOUR)
    VERBS[verb](order, policy, now + 2 * HOUR)


def test_fifty_replaces_push_a_deadline_no_further_than_one(
    order: Order, policy: dq.TimeoutPolicy[Any], now: datetime
) -> None:
    refused = 0
    for number in range(50):
        with clock.set_to(now + number * HOUR):
            try:
                dq.schedule_timeout(order, policy, hours=1)
            except dq.ExtensionLimit:
                refused += 1
    assert Timeout.objects.get().due_at == now + 3 * HOUR
    assert refused == 47


def test_of_many_those_at_their_limit_are_left_alone_or_refuse_all_that_are_scheduled_with_them(
    policy: dq.TimeoutPolicy[Any], now: datetime
) -> None:
    orders = [Order.objects.create(status="new") for _ in range(3)]
    dq.schedule_timeout(orders[0], policy, at=now + HOUR)
    with pytest.raises(dq.ExtensionLimit):
        dq.schedule_timeouts(orders, policy, at=now + 4 * HOUR)
    assert Timeout.objects.count() == 1
    assert dq.schedule_timeouts(orders, policy, at=now + HOUR, on_conflict="keep") == 2
    dq.extend_timeout(orders[0], policy, hours=2)
    rows = dq.pending_timeouts(Order, policy)
    assert dq.extend_timeouts(rows, minutes=90) == 2
    assert dq.reschedule_timeouts(rows, at=now + 4 * HOUR) == 0
    assert dq.reschedule_timeouts(rows, at=now + 2.75 * HOUR) == 3, "one of them is moved earlier"


def test_an_overdue_one_may_be_made_due_now(order: Order, policy: dq.TimeoutPolicy[Any], now: datetime) -> None:
    dq.schedule_timeout(order, policy, at=now + HOUR)
    with clock.set_to(now + 9 * HOUR):
        assert dq.schedule_timeout(order, policy, seconds=0).due_at == now + 9 * HOUR
        with pytest.raises(dq.ExtensionLimit):
            dq.schedule_timeout(order, policy, seconds=1)


def test_operators_and_new_values_of_since_are_not_limited(order: Order, declare: Declare, now: datetime) -> None:
    policy = declare(
        Order, name="bounded", after=HOUR, since="paid_at", when=Q(status="unpaid"), limits=dq.Limits(total=HOUR)
    )
    order.paid_at = now
    order.save()
    rows = dq.pending_timeouts(order, policy)
    assert operations.postpone(rows, by="ana", reason="call", hours=5).changed == 1
    with pytest.raises(dq.ExtensionLimit):
        dq.extend_timeout(order, policy, minutes=1)
    order.paid_at = now + 20 * HOUR
    order.save()
    row = rows.get()
    assert (row.first_due_at, row.due_at) == (now + 21 * HOUR, now + 21 * HOUR)
    assert dq.extend_timeout(order, policy, hours=1)


def test_a_policy_without_total_needs_no_more_statements(order: Order, declare: Declare) -> None:
    counts = []
    for name, limits in (("plain", None), ("limited", dq.Limits(snoozes=3))):
        policy = declare(Order, name=name, limits=limits)
        counts.append([len(sql_of(lambda p=policy: dq.schedule_timeout(order, p, hours=1))) for _ in range(2)])  # type: ignore[misc]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("wrong", [60, "1h", -HOUR])
def test_a_total_that_is_no_length_of_time_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="total must"):
        dq.Limits(total=wrong)
