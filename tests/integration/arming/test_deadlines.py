"""Deadlines that are unusual: before `since`, beyond the calendar, or passed long ago when they are to be armed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import TimeoutPolicy, clock, testing
from django_delayq.arming.scan import candidates
from django_delayq.arming.sync import Synced, TableSync, count_too_old, sync_policy
from django_delayq.models import PolicySync, Timeout
from tests.integration.arming.conftest import SINCE
from tests.support.typed import Declare
from tests.support.workers import states_in_order as states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
KINDS: dict[str, dict[str, Any]] = {
    "columns": {},
    "since": {"since": SINCE["function"]},
    "after": {"after": lambda order: HOUR},
}
"""Policies that the database evaluates, and those with a function, so that Python decides."""


def declared(declare: Declare, **options: Any) -> TimeoutPolicy[Any]:
    return declare(Order, **{"name": "pays", "since": "created_at", "after": HOUR, "when": Q(status="pays")} | options)


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, declare: Declare) -> TimeoutPolicy[Any]:
    return declared(declare, **KINDS[request.param])


def new_order(created_at: datetime | None = None) -> Order:
    return Order.objects.create(status="pays", created_at=created_at)


# A negative `after`: due before the time that it counts from, such as an hour before an appointment.


def test_it_is_due_before_the_time_it_counts_from_in_every_way_to_arm_and_to_read(declare: Declare) -> None:
    policy = declared(declare, after=-HOUR)
    starts_at = timezone.now() + 2 * DAY
    new_order(starts_at)
    Order.objects.bulk_create([Order(status="pays", created_at=starts_at) for _ in range(4)])
    saved, saved_later, by_sync, by_hand, in_bulk = Order.objects.order_by("pk")
    saved_later.save()
    dq.schedule_timeouts([in_bulk], policy)
    dq.schedule_timeout(by_hand, policy)
    assert sync_policy(policy, "default").armed == 1
    for order in (saved, saved_later, by_sync, by_hand, in_bulk):
        assert dq.get_deadline(order, policy) == starts_at - HOUR
    found: Any = Order.objects.annotate(due=dq.Deadline("pays")).get(pk=saved.pk)
    assert found.due == starts_at - HOUR
    saved.created_at = starts_at + HOUR
    saved.save()
    assert dq.get_deadline(saved, policy) == starts_at
    assert sync_policy(policy, "default") == Synced()


def test_a_callable_may_be_negative_with_since_only(declare: Declare) -> None:
    policy = declared(declare, after=lambda order: -HOUR, since=SINCE["function"])
    declare(Order, name="by_hand", after=lambda order: -HOUR)
    order = new_order(timezone.now() + 2 * HOUR)
    assert dq.get_deadline(order, policy) == order.created_at - HOUR  # type: ignore[operator]
    with pytest.raises(dq.InvalidDelay, match="must not be negative, but is -1 h"):
        dq.schedule_timeout(order, "by_hand")


# A `since` that means "never", such as 31 December 9999: nothing is armed, and nothing raises.
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
AWAY = [NEVER, datetime(2108, 12, 31, 23, 30, tzinfo=UTC)]


@pytest.mark.parametrize("away", AWAY)
def test_never_arms_nothing_cancels_what_was_pending_and_raises_nothing(
    policy: TimeoutPolicy[Any], away: datetime
) -> None:
    now = timezone.now()
    order = new_order(away)
    with transaction.atomic():
        order.save(update_fields=["created_at"])
    assert states() == []
    for order.created_at in (now, away):
        order.save()
    assert states() == ["cancelled"]
    order.created_at = now
    order.save()
    assert dq.get_deadline(order, policy) == now + HOUR, "a datetime arms it again"
    Timeout.objects.all().delete()
    Order.objects.bulk_create([Order(status="pays", created_at=at) for at in (away, now, away)])
    assert sync_policy(policy, "default") == Synced(armed=2)
    Timeout.objects.all().delete()
    assert dq.sync_timeouts(Order.objects.all()) == 2
    Order.objects.update(created_at=away)
    assert sync_policy(policy, "default") == Synced(cancelled=2)


def test_the_database_leaves_such_rows_out_of_each_sync(declare: Declare) -> None:
    Order.objects.bulk_create([Order(status="pays", created_at=at) for at in AWAY])
    last = new_order(datetime(2108, 12, 31, 22, 30, tzinfo=UTC))
    policy = declared(declare)
    assert list(candidates(policy, "default", delay=HOUR)) == [last]
    assert sync_policy(policy, "default", backfill=True) == Synced(armed=1)


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL has such a datetime")
def test_infinity_counts_as_never_although_no_driver_can_read_it(declare: Declare) -> None:
    policy = declared(declare)
    bad, good = (new_order(timezone.now()) for _ in range(2))
    with connection.cursor() as cursor:
        cursor.execute("UPDATE testapp_order SET created_at = 'infinity' WHERE id = %s", [bad.pk])
    assert dq.sync_timeouts(Order.objects.filter(pk=bad.pk).only("pk")) == 1
    Timeout.objects.filter(object_id=good.pk).delete()
    assert sync_policy(policy, "default") == Synced(armed=1)
    assert dq.get_deadline(good, policy)


def test_the_verbs_ask_for_a_delay_and_take_one(policy: TimeoutPolicy[Any]) -> None:
    order = new_order(NEVER)
    for call in (lambda: dq.schedule_timeout(order, policy), lambda: dq.schedule_timeouts([order], policy)):
        with pytest.raises(dq.InvalidDelay, match="no deadline of its own"):
            call()
    row = dq.schedule_timeout(order, policy, seconds=0)
    row.refresh_from_db()
    assert row.since_at is None, "pages could not show 31 December 9999 in a zone east of Greenwich"
    order.save()
    assert sync_policy(policy, "default") == Synced()
    assert testing.fire_due(policy) == 1
    assert dq.cancel_timeout(order, policy) is False


# How old a deadline may be that is armed by the sync, and by the handler of the policy.


def pending(policy: TimeoutPolicy[Any], order: Order) -> bool:
    return order.timeouts.filter(policy=policy.label, state="pending").exists()


@pytest.mark.parametrize(("days", "armed"), [(6, True), (8, False)])
def test_it_is_armed_up_to_catch_up_and_then_counted_as_too_old(
    policy: TimeoutPolicy[Any], days: int, armed: bool
) -> None:
    begin = timezone.now() - days * DAY - HOUR
    with clock.set_to(begin):
        order = new_order(begin)
        Order.objects.update(status="paying")
        sync_policy(policy, "default")
    Order.objects.update(status="pays")
    assert count_too_old(policy, "default").value == (0 if armed else 1)
    assert ("too long ago" in str(dq.explain_timeout(order, policy))) is not armed
    assert sync_policy(policy, "default").armed == armed
    assert pending(policy, order) is armed


def test_a_forgotten_order_of_the_same_age_is_not_armed(policy: TimeoutPolicy[Any]) -> None:
    Order.objects.bulk_create([Order(status="pays", created_at=timezone.now() - HOUR - 10 * MINUTE)])
    order = Order.objects.get()
    times = dict.fromkeys(("before_at", "began_at", "finished_at"), timezone.now() - MINUTE)
    PolicySync.objects.filter(policy=policy.label).update(**times, claimed_until=None)  # workers run all the time
    TableSync("default").run(at_once=True)
    assert sync_policy(policy, "default").armed == 0
    assert not pending(policy, order)
    assert count_too_old(policy, "default").value == 1
    assert "workers" in str(dq.explain_timeout(order, policy))
    assert dq.sync_timeouts(order) == 1, "as saving it"


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_chain_that_its_own_handler_advances_survives_a_pause(declare: Declare, is_batch: bool) -> None:
    """Each firing sets the `since` of the next one, whose deadline passed more than CATCH_UP ago, too."""
    fired: list[datetime] = []

    def bill(order: Any, timeout: Timeout) -> None:
        fired.append(timeout.due_at)
        order.created_at += DAY
        order.save()

    def bill_all(orders: Any, timeouts: list[Timeout]) -> None:
        fired.extend(timeout.due_at for timeout in timeouts)
        for order in list(orders):
            orders.filter(pk=order.pk).update(created_at=order.created_at + DAY)

    options: dict[str, Any] = {"name": "bills", "since": "created_at", "after": HOUR, "when": Q(status="pays")}
    policy = declare(Order, bill_all, batch=10, **options) if is_batch else declare(Order, bill, **options)
    begin = timezone.now() - 9 * DAY
    with clock.set_to(begin):
        for _ in range(2):
            new_order(begin)
    for _ in range(12):
        testing.fire_due(policy)
    assert len(fired) == 18, "nine days of two orders"
    assert Timeout.objects.pending().filter(policy=policy.label, due_at__gt=timezone.now()).count() == 2
