"""`hold_when`: saving, syncing and bulk writes stop clocks and let them run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F, Q
from django.test.utils import CaptureQueriesContext

import django_delayq as dq
from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.arming.sync import Synced, automatic_policies, sync_policy
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.held.times import HOUR, T0, Declare, again, at, hours
from tests.testapp.models import Customer, Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
Change = Callable[..., None]
TALKS = Q(note="talks")


def save(order: Order, **values: Any) -> None:
    """Save other values of an order, and nothing else."""
    for name, value in values.items():
        setattr(order, name, value)
    order.save(update_fields=list(values))


def update_and_sync(order: Order, **values: Any) -> None:
    """Write other values as SQL would, and sync them."""
    Order.objects.filter(pk=order.pk).update(**values)
    dq.sync_timeouts(order)


def update_and_wait(order: Order, **values: Any) -> None:
    """Write other values as SQL would, and compare the tables, as a worker does."""
    Order.objects.filter(pk=order.pk).update(**values)
    for policy in automatic_policies("default"):
        sync_policy(policy, "default")


@pytest.fixture(params=[save, update_and_sync, update_and_wait])
def change(request: pytest.FixtureRequest) -> Change:
    """Change an order in one of the ways in which it is noticed."""
    way: Change = request.param
    return way


@pytest.fixture(params=["column", "function", "function after", "related"])
def policy(request: pytest.FixtureRequest, declare: Declare) -> dq.TimeoutPolicy[Any]:
    """A policy of four hours, with a `hold_when`."""
    options: dict[str, Any] = {"after": 4 * HOUR, "since": "created_at", "when": Q(status="unpaid"), "hold_when": TALKS}
    if request.param == "function":
        options["since"] = lambda order: order.created_at
    elif request.param == "function after":
        options["after"] = lambda order: 4 * HOUR
    elif request.param == "related":
        options["hold_when"] = TALKS & (Q(customer=None) | Q(customer__name="any"))
    return declare(Order, name="talking", **options)


def only(policy: Any, **where: Any) -> Timeout:
    return Timeout.objects.filter(policy=policy.label, **where).latest("pk")


def test_its_clock_is_stopped_while_the_condition_holds(policy: Any, change: Change) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    with at(1):
        change(order, note="talks")
    row = only(policy)
    assert (row.state, row.remaining, row.held_by_hand) == ("held", 3 * HOUR, False)
    with at(50):
        assert not fire_due(policy)
        change(order, paid_at=None)
        assert again(row).remaining == 3 * HOUR
        change(order, note="no more")
    row = again(row)
    assert (row.state, row.remaining, hours(row.due_at), hours(row.run_at)) == ("pending", None, 53, 53)
    assert [event["what"] for event in row.history] == ["held", "resumed"]
    with at(54):
        assert len(fire_due(policy).fired) == 1


def test_held_from_the_start_all_of_its_time_is_left(policy: Any, change: Change) -> None:
    with at(1):
        order = Order.objects.create(created_at=T0, note="talks")
    row = only(policy)
    assert (row.state, row.remaining, hours(row.due_at)) == ("held", 4 * HOUR, 4)
    with at(6):
        change(order, note="")
    assert hours(again(row).due_at) == 10


def test_leaving_the_condition_cancels_and_coming_back_continues(policy: Any, change: Change) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    with at(3):
        change(order, note="talks")
    with at(20):
        change(order, status="paid")
    first = only(policy)
    assert (first.state, first.cause, first.remaining) == ("cancelled", "condition", HOUR)
    with at(300):
        change(order, status="unpaid")
    second = only(policy)
    assert (second.pk != first.pk, second.state, second.remaining) == (True, "held", HOUR)
    assert second.idempotency_key == first.idempotency_key
    with at(301):
        change(order, status="paid")
    with at(302):
        change(order, status="unpaid", note="")
    third = only(policy)
    assert (third.state, hours(third.due_at), hours(third.restarted_at)) == ("pending", 303, 302)


def test_another_start_begins_a_new_round(policy: Any, change: Change) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    with at(3):
        change(order, note="talks")
        dq.hold_timeout(order, policy)
    with at(10):
        change(order, created_at=T0 + 10 * HOUR)
    row = only(policy)
    assert (row.state, row.remaining, row.held_by_hand, hours(row.due_at)) == ("held", 4 * HOUR, False, 14)
    with at(11):
        change(order, created_at=T0 + 11 * HOUR, note="")
    assert (again(row).state, hours(again(row).run_at)) == ("pending", 15)


def test_a_hold_by_hand_and_the_condition_are_independent(policy: Any, change: Change) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    with at(1):
        row = dq.hold_timeout(order, policy)
    assert row is not None
    with at(2):
        change(order, note="talks")
    assert (again(row).remaining, again(row).held_by_hand) == (3 * HOUR, True)
    with at(3):
        change(order, note="")
    assert again(row).state == "held"
    with at(4):
        change(order, note="talks")
        dq.resume_timeout(order, policy)
    assert (again(row).state, again(row).held_by_hand) == ("held", False)
    with at(5):
        dq.hold_timeout(order, policy, until=T0 + 6 * HOUR)
    with at(7):
        assert end_holds_by_hand("default") == 0
    assert (again(row).state, again(row).held_by_hand, again(row).held_until) == ("held", False, None)
    with at(8):
        change(order, note="")
    assert hours(again(row).due_at) == 11


def test_nothing_is_left_of_a_deadline_that_had_passed_unnoticed(policy: Any) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    with at(5):
        save(order, note="talks")
    row = only(policy)
    assert (row.state, row.remaining) == ("held", timedelta(0))
    with at(6):
        save(order, note="")
        assert len(fire_due(policy).fired) == 1


def test_a_sync_of_the_table_counts_what_it_changes(policy: Any) -> None:
    with at(0):
        orders = [Order.objects.create(created_at=T0) for _ in range(4)]
    with at(1):
        dq.hold_timeout(orders[3], policy)
        Order.objects.filter(pk__in=[order.pk for order in orders[:2]]).update(note="talks")
        assert sync_policy(policy, "default", dry_run=True) == Synced(held=2)
        assert sync_policy(policy, "default") == Synced(held=2)
        assert sync_policy(policy, "default") == Synced()
        Order.objects.update(note="")
        assert sync_policy(policy, "default") == Synced(resumed=2)
        Order.objects.update(status="paid")
        assert sync_policy(policy, "default") == Synced(cancelled=4)


def test_bulk_writes_arm_held_rounds(policy: Any) -> None:
    with at(1):
        Order.objects.bulk_create([Order(created_at=T0, note="talks" if number % 2 else "") for number in range(6)])
        assert dq.sync_timeouts(Order.objects.all()) >= 6
        assert sorted(Timeout.objects.filter(policy=policy.label).values_list("state", flat=True)) == (
            ["held"] * 3 + ["pending"] * 3
        )
        Order.objects.update(created_at=F("created_at") + HOUR)
        dq.sync_timeouts(Order.objects.all())
    rows = Timeout.objects.filter(policy=policy.label)
    assert {(row.state, row.remaining, hours(row.due_at)) for row in rows} == {
        ("held", 4 * HOUR, 5),
        ("pending", None, 5),
    }


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("delay", "left"), [({}, 4), ({"hours": 7}, 7), ({"at": T0 + 5 * HOUR}, 3)])
def test_scheduling_by_hand_is_held_while_the_condition_holds(
    policy: Any, many: bool, delay: dict[str, Any], left: float
) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0, note="talks")
    with at(2):
        if many:
            assert dq.schedule_timeouts([order], policy, **delay) == 1
        else:
            assert dq.schedule_timeout(order, policy, **delay).state == "held"
    row = only(policy)
    assert (row.state, row.remaining) == ("held", left * HOUR)
    with at(3):
        save(order, note="")
    assert hours(again(row).run_at) == 3 + left


def test_a_strict_guard_treats_a_stopped_clock_as_not_passed(policy: Any) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    Order.objects.update(note="talks")  # not noticed
    with at(5), dq.before_deadline(order, policy, strict=True) as row:
        assert row is not None


def test_a_policy_without_it_reads_nothing_of_it(declare: Declare) -> None:
    declare(Order, name="plain", after=4 * HOUR, since="created_at", when=Q(status="unpaid"))
    with CaptureQueriesContext(
        connection,
    ) as statements:
        order = Order.objects.create(created_at=T0)
        order.save()
    read = [each["sql"] for each in statements if each["sql"].startswith("SELECT")]
    assert read
    assert not any("held" in sql or "remaining" in sql for sql in read)


def test_a_related_condition_is_followed_by_a_sync(declare: Declare) -> None:
    policy = declare(
        Order,
        name="vip",
        after=4 * HOUR,
        since="created_at",
        when=Q(status="unpaid"),
        hold_when=Q(customer__vip=True),
    )
    with at(0):
        order = Order.objects.create(created_at=T0, customer=Customer.objects.create())
    with at(1):
        Customer.objects.update(vip=True)
        assert sync_policy(policy, "default") == Synced(held=1)
    with at(2):
        Customer.objects.update(vip=False)
        order.save()
    assert hours(only(policy).due_at) == 5


def test_rounds_with_a_key_follow_the_condition_too(policy: Any, change: Change) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
        keyed = dq.schedule_timeout(order, policy, key="part", hours=9)
        by_hand = dq.schedule_timeout(order, policy, key="other", hours=9)
        dq.hold_timeout(by_hand)
    with at(1):
        change(order, note="talks")
    assert (again(keyed).state, again(keyed).remaining) == ("held", 8 * HOUR)
    assert only(policy, key="").state == "held"
    assert dq.schedule_timeout(order, policy, key="new", hours=1).state == "held"
    with at(2):
        change(order, note="")
    assert (again(keyed).state, hours(again(keyed).due_at)) == ("pending", 10)
    assert again(by_hand).state == "held"
    assert only(policy, key="new").state == "pending"
    with at(3):
        assert sync_policy(policy, "default") == Synced()
    Order.objects.update(note="talks")
    with at(20):
        fire_due(policy)
    assert again(keyed).state == "held"
    with at(21):
        change(order, note="")
        fire_due(policy)
    assert again(keyed).state == "fired"
