"""Saving and the sync arm, move and cancel; declarations that cannot be (DESIGN 3.1 and 6)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core import serializers
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import Synced, automatic_policies, sync_policy
from django_delayq.models import Timeout
from tests.integration.operations.conftest import as_if
from tests.support.seen import sql_of
from tests.testapp.models import Customer, ExpressOrder, Order, OrderProxy, Plain
from tests.testapp.timeouts import cancel_unpaid

pytestmark = pytest.mark.django_db(transaction=True)
HALF_HOUR = timedelta(minutes=30)


@pytest.fixture
def now() -> datetime:
    return timezone.now().replace(microsecond=123456)


@pytest.fixture
def order(now: datetime) -> Order:
    return Order.objects.create(created_at=now)


def rounds(obj: Any = None) -> list[Timeout]:
    rows = Timeout.objects.order_by("id")
    return list(rows if obj is None else rows.filter(object_id=str(obj.pk)))


def save(obj: Any, **values: Any) -> None:
    vars(obj).update(values)
    obj.save()


@pytest.mark.parametrize(
    ("state", "cause", "is_open"),
    [
        *(("fired", "due", False), ("dead", "retries", False), ("cancelled", "hand", False), ("firing", "", False)),
        *(("skipped", "handler", False), ("skipped", "condition", True), ("cancelled", "condition", True)),
    ],
)
def test_a_round_is_armed_again_only_if_its_condition_has_ended_it(
    order: Order, now: datetime, state: str, cause: str, is_open: bool
) -> None:
    as_if(rounds()[0], state, cause)
    order.save()
    assert [row.state for row in rounds()] == [state, *["pending"] * is_open]
    if not is_open and state != "firing":
        save(order, created_at=now + timedelta(minutes=1))
        assert [row.state for row in rounds()] == [state, "pending"], "the next round"
        save(order, created_at=now)  # back to the closed round
        assert [(row.state, row.cause) for row in rounds()] == [(state, cause), ("cancelled", "superseded")]


def test_proxies_and_children_are_saved_as_orders_too_and_share_their_rounds(now: datetime) -> None:
    for model in (OrderProxy, ExpressOrder):
        obj = model.objects.create(created_at=now)
        row = dq.schedule_timeout(obj, "remind", minutes=5)
        parent = Order.objects.get(pk=obj.pk)
        assert dq.get_deadline(parent, "cancel_unpaid") == now + HALF_HOUR
        assert dq.schedule_timeout(parent, "remind", minutes=5) == row
        save(obj, status="paid")
        assert [row.state for row in rounds(obj)] == ["cancelled", "pending"]


def test_a_raw_save_arms_nothing(now: datetime) -> None:
    text = serializers.serialize("json", [Order(pk=77, created_at=now)])
    for loaded in serializers.deserialize("json", text):
        loaded.save()
    assert rounds() == []


def test_a_save_costs_at_most_two_more_queries_and_none_without_policies(order: Order, now: datetime) -> None:
    def queries(obj: Order) -> int:
        with transaction.atomic():
            return len([sql for sql in sql_of(obj.save) if "SAVEPOINT" not in sql and "id = -1" not in sql])

    order.note = "no change"
    assert queries(order) == 1 + 1
    order.status = "paid"
    assert queries(order) == 1 + 2
    assert queries(Order(created_at=now)) == 1 + 2
    assert not any("timeout" in sql.lower() for sql in sql_of(lambda: order.save(update_fields=["note"])))
    plain = Plain.objects.create()
    sent = sql_of(plain.save) + sql_of(Plain.objects.all().delete)
    assert not any("timeout" in sql.lower() for sql in sent)


def test_after_may_be_a_callable_that_exempts(declare: Any, now: datetime) -> None:
    def after(order: Order) -> timedelta | None:
        return None if order.note == "cash" else timedelta(minutes=len(order.note or ""))

    declare(Order, name="exempting", since="paid_at", when=Q(), after=after)
    card = Order.objects.create(paid_at=now, note="card!")
    assert rounds(card)[0].due_at == now + timedelta(minutes=5)
    save(card, note="cash")
    assert not dq.pending_timeouts(card)
    with pytest.raises(dq.InvalidDelay, match="exempts"):
        dq.schedule_timeout(card, "exempting")
    save(card, note="card!")
    assert dq.pending_timeouts(card).get().due_at == now + timedelta(minutes=5), "the round stayed open"


def test_a_condition_on_related_rows_in_either_direction_arms_each_object_once(declare: Any, now: datetime) -> None:
    declare(Order, name="vip", since="paid_at", after=HALF_HOUR, when=Q(customer__vip=True))
    declare(Customer, name="many", since=lambda customer: now, after=HALF_HOUR, when=Q(order__status="unpaid"))
    vip = Customer.objects.create(vip=True)
    for values in ({"paid_at": now}, {"paid_at": now, "customer": vip}, {"customer": vip}):
        Order.objects.create(**values)
    vip.save()
    assert [row.policy.rpartition(".")[2] for row in rounds()] == ["vip", "many"]


def test_null_in_the_condition_counts_as_false(declare: Any, now: datetime) -> None:
    declare(Order, name="noted", since="paid_at", after=HALF_HOUR, when=~Q(note="x") & Q(note__gt=""))
    Order.objects.create(paid_at=now, note=None)
    assert rounds() == []


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
        *(({option: value}, option) for option in ("aliases", "search") for value in ((1,), 1, None)),
        ({"name": "has space"}, "name"),
    ],
)
def test_a_wrong_declaration_is_refused_with_a_hint(declare: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(dq.PolicyError, match=message):
        declare(Order, **{"name": "wrong", **options})
    assert "testapp.order.wrong" not in {policy.label for policy in dq.get_policies()}


def test_the_background_sync_arms_what_is_not_long_overdue_and_backfill_the_rest(now: datetime) -> None:
    def sync_all() -> Synced:
        return sum((sync_policy(policy, "default") for policy in automatic_policies("default")), Synced())

    ages = (timedelta(minutes=-5), timedelta(seconds=90), timedelta(minutes=3))
    Order.objects.bulk_create(Order(created_at=now - HALF_HOUR - ago) for ago in ages)
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


# The sync asks the database which rounds no longer fit: whatever the type of the key, and in few queries.
def test_a_ledger_that_fits_costs_a_query_for_each_way_and_not_one_for_each_page(now: datetime) -> None:
    Order.objects.bulk_create([Order(created_at=now) for _ in range(1200)])
    assert sync_policy(cancel_unpaid, "default").armed == 1200
    sent = sql_of(lambda: sync_policy(cancel_unpaid, "default"))
    assert len(sent) == 5, "one for each way, one for moved deadlines, and two for what operators have done"


@pytest.mark.parametrize("text", ["", "abc", "12abc", "9" * 30, "-", "0x1", "12.5", "\u0661"])
def test_an_object_id_that_is_no_key_disturbs_nobody(now: datetime, text: str) -> None:
    order, other = (Order.objects.create(created_at=now) for _ in range(2))
    row = Timeout.objects.get(object_id=str(order.pk))
    Timeout.objects.filter(pk=row.pk).update(object_id=text)
    Order.objects.filter(pk=other.pk).update(status="paid")
    assert sync_policy(cancel_unpaid, "default").cancelled == 1
    assert Timeout.objects.get(object_id=str(other.pk)).state == "cancelled"
    assert Timeout.objects.get(pk=row.pk).state == "pending", "the firing settles it"
