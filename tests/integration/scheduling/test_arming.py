"""Saving arms, moves and cancels; rounds, hand-set and old deadlines (DESIGN 3.1 and 6)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import Synced, automatic_policies, sync_policy
from django_delayq.models import Timeout
from tests.integration.operations.conftest import as_if
from tests.testapp.models import ExpressOrder, Order, OrderProxy, Plain

pytestmark = pytest.mark.django_db(transaction=True)
HALF_HOUR = timedelta(minutes=30)
State = Timeout.State


@pytest.fixture
def now() -> datetime:
    return timezone.now().replace(microsecond=123456)


@pytest.fixture
def order(now: datetime) -> Order:
    return Order.objects.create(created_at=now)


def rounds(obj: Any = None) -> list[Timeout]:
    rows = Timeout.objects.order_by("id")
    return list(rows if obj is None else rows.filter(object_id=str(obj.pk)))


def sync_all() -> Synced:
    return sum((sync_policy(policy, "default") for policy in automatic_policies("default")), Synced())


def test_saving_cancels_when_the_condition_stops_holding_and_arms_again_when_it_holds(order: Order) -> None:
    order.status = "paid"
    order.save()
    (row,) = rounds()
    assert (row.state, row.cause) == ("cancelled", "condition")
    order.status = "unpaid"
    order.save()
    assert [row.state for row in rounds()] == ["cancelled", "pending"]


def test_saving_moves_when_the_value_it_counts_from_changes(order: Order, now: datetime) -> None:
    before = rounds()[0]
    order.created_at = now + timedelta(hours=1)
    order.save()
    (row,) = rounds()
    assert (row.since_at, row.due_at) == (now + timedelta(hours=1), now + timedelta(hours=1) + HALF_HOUR)
    assert row.idempotency_key != before.idempotency_key
    order.created_at = None
    order.save()
    (row,) = rounds()
    assert (row.state, row.cause) == ("cancelled", "condition")


def test_a_deadline_set_by_hand_survives_saves(order: Order) -> None:
    dq.schedule_timeout(order, "cancel_unpaid", hours=5)
    by_hand = rounds()[0].due_at
    order.note = "changed"
    order.save()
    assert [row.due_at for row in rounds()] == [by_hand]


@pytest.mark.parametrize(
    ("state", "cause"), [("fired", "due"), ("dead", "retries"), ("cancelled", "hand"), ("skipped", "handler")]
)
def test_a_closed_round_is_not_armed_again_but_the_next_one_is(
    order: Order, now: datetime, state: str, cause: str
) -> None:
    as_if(rounds()[0], state, cause)
    order.save()
    assert len(rounds()) == 1
    order.created_at = now + timedelta(minutes=1)
    order.save()
    assert [row.state for row in rounds()] == [state, "pending"]
    order.created_at = now  # back to the closed round
    order.save()
    assert [(row.state, row.cause) for row in rounds()] == [(state, cause), ("cancelled", "superseded")]


@pytest.mark.parametrize(("state", "cause"), [("skipped", "condition"), ("cancelled", "condition")])
def test_a_round_that_ended_because_the_condition_failed_is_open(order: Order, state: str, cause: str) -> None:
    as_if(rounds()[0], state, cause)
    order.save()
    assert [row.state for row in rounds()] == [state, "pending"]


def test_a_round_that_is_firing_is_not_armed_a_second_time(order: Order) -> None:
    Timeout.objects.update(state="firing", slot_taken=None)
    order.save()
    assert [row.state for row in rounds()] == ["firing"]


def test_saving_arms_an_overdue_round_only_within_catch_up(now: datetime) -> None:
    young = Order.objects.create(created_at=now - timedelta(days=6))
    old = Order.objects.create(created_at=now - timedelta(days=8))
    assert [len(rounds(young)), len(rounds(old))] == [1, 0]
    assert "too long ago" in str(dq.explain_timeout(old, "cancel_unpaid"))


def test_proxies_and_children_are_saved_as_orders_too(now: datetime) -> None:
    proxy = OrderProxy.objects.create(created_at=now)
    child = ExpressOrder.objects.create(created_at=now)
    assert [len(rounds(proxy)), len(rounds(child))] == [1, 1]
    assert dq.get_deadline(proxy, "cancel_unpaid") == now + HALF_HOUR
    assert dq.get_deadline(child, "cancel_unpaid") == now + HALF_HOUR
    child.status = "paid"
    child.save()
    assert rounds(child)[0].state == "cancelled"


def test_a_raw_save_arms_nothing(now: datetime) -> None:
    from django.core import serializers

    text = serializers.serialize("json", [Order(pk=77, created_at=now)])
    for loaded in serializers.deserialize("json", text):
        loaded.save()
    assert rounds() == []


def test_update_fields_that_concern_no_policy_cost_no_query(order: Order) -> None:
    with CaptureQueriesContext(
        connection,
    ) as captured:
        order.note = "x"
        order.save(update_fields=["note"])
    assert [query["sql"] for query in captured if "timeout" in query["sql"].lower()] == []
    order.status = "paid"
    order.save(update_fields=["status"])
    assert rounds()[0].state == "cancelled"


def test_a_save_costs_at_most_two_more_queries(order: Order, now: datetime) -> None:
    def queries(obj: Order) -> int:
        with transaction.atomic():
            with CaptureQueriesContext(connection) as captured:
                obj.save()
            return len(
                [query for query in captured if "SAVEPOINT" not in query["sql"] and "id = -1" not in query["sql"]]
            )

    order.note = "no change"
    assert queries(order) == 1 + 1
    order.status = "paid"
    assert queries(order) == 1 + 2
    assert queries(Order(created_at=now)) == 1 + 2


def test_models_without_policies_pay_nothing() -> None:
    plain = Plain.objects.create()
    with CaptureQueriesContext(connection) as captured:
        plain.save()
        Plain.objects.all().delete()
    assert not any("timeout" in query["sql"].lower() for query in captured)


def test_after_may_be_a_callable_that_exempts(declare: Any, now: datetime) -> None:
    declare(
        Order,
        name="exempting",
        since="paid_at",
        when=Q(),
        after=lambda order: None if order.note == "cash" else timedelta(minutes=len(order.note)),
    )
    cash = Order.objects.create(paid_at=now, note="cash")
    card = Order.objects.create(paid_at=now, note="card!")
    assert rounds(cash) == []
    assert rounds(card)[0].due_at == now + timedelta(minutes=5)
    with pytest.raises(dq.InvalidDelay, match="exempts"):
        dq.schedule_timeout(cash, "exempting")


def test_null_in_the_condition_counts_as_false(declare: Any, now: datetime) -> None:
    declare(Order, name="noted", since="paid_at", after=HALF_HOUR, when=~Q(note="x") & Q(note__gt=""))
    Order.objects.create(paid_at=now, note=None)
    assert rounds() == []


def test_deleting_many_cancels_them_in_few_queries(now: datetime) -> None:
    for _ in range(30):
        Order.objects.create(created_at=now)
    with CaptureQueriesContext(connection) as captured:
        Order.objects.all().delete()
    assert {(row.state, row.cause) for row in rounds()} == {("cancelled", "gone")}
    assert len([query for query in captured if "django_delayq_timeout" in query["sql"]]) <= 4


def test_a_child_that_is_deleted_cancels_what_its_parent_waits_for(now: datetime) -> None:
    ExpressOrder.objects.create(created_at=now).delete()
    assert (rounds()[0].state, rounds()[0].cause) == ("cancelled", "gone")


def test_two_policies_of_one_name_are_refused(declare: Any) -> None:
    with pytest.raises(dq.PolicyError, match="declared twice"):
        declare(Order, name="cancel_unpaid")
    with pytest.raises(dq.PolicyError, match="declared twice"):
        declare(Order, name="other", aliases=["cancel_unpaid"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"since": "creatd_at", "after": HALF_HOUR}, "created_at"),
        ({"since": "status", "after": HALF_HOUR}, "DateTimeField"),
        ({"when": Q(statuss="x")}, "statuss"),
        ({"when": "unpaid"}, "Q"),
        ({"after": 30}, "timedelta"),
        ({"after": -HALF_HOUR}, "negative without since, but is -30 min"),
        ({"batch": 0}, "batch"),
        ({"batch": True}, "batch"),
        ({"batch": 5, "atomic": False}, "batch needs atomic"),
        ({"together": 0}, "together must be an int from 1"),
        ({"together": "5"}, "together must be an int"),
        ({"together": 5, "atomic": False}, "together needs atomic"),
        ({"together": 5, "batch": 5}, "but not both"),
        ({"retry": 3}, "Retry"),
        ({"max_extensions": -1}, "max_extensions"),
        ({"queue": ""}, "queue"),
        ({"aliases": ["a.b"]}, "aliases"),
        ({"name": "has space"}, "name"),
    ],
)
def test_a_wrong_declaration_is_refused_with_a_hint(declare: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(dq.PolicyError, match=message):
        declare(Order, **{"name": "wrong", **options})
    assert "testapp.order.wrong" not in {policy.label for policy in dq.get_policies()}


def test_the_background_sync_arms_what_is_not_long_overdue_and_backfill_the_rest(now: datetime) -> None:
    fresh, late, old = Order.objects.bulk_create(
        Order(created_at=now - HALF_HOUR - ago)
        for ago in (timedelta(minutes=-5), timedelta(seconds=90), timedelta(minutes=3))
    )
    fresh, late, old = Order.objects.order_by("-created_at")
    gone = Order.objects.create(created_at=now)
    Order.objects.filter(pk=gone.pk)._raw_delete("default")
    done = sync_all()
    assert (done.armed, done.cancelled) == (2, 1)
    assert [len(rounds(one)) for one in (fresh, late, old)] == [1, 1, 0]
    assert rounds(gone)[0].cause == "gone"
    policy = dq.get_policy((Order, "cancel_unpaid"))
    assert sync_policy(policy, "default", backfill=True, dry_run=True).armed == 1
    assert rounds(old) == []
    assert sync_policy(policy, "default", backfill=True).armed == 1
    assert sync_all() == Synced()
