"""Rows that a policy reads beside its object: writing them arms, moves, holds and cancels as saving the object does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.conf import settings
from django.contrib.contenttypes.models import ContentType
from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q
from django.test.utils import CaptureQueriesContext

from django_delayq.arming.sync import sync_policy
from django_delayq.arming.watched import MOST
from django_delayq.checks import check_bulk_writes, check_policies
from django_delayq.models import PolicySync, Timeout
from tests.support.purchases import MINUTE, UNPAID, Declare, at, bought, due, its_channel, noon  # noqa: F401 - fixtures
from tests.testapp.market import Channel, Label, Merchant, Offer, Payment, Purchase, Refund, Remark

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
NOT_PAID = ~Q(payments__status="captured")


@pytest.fixture
def unpaid(declare: Declare) -> Any:
    return declare(Purchase, name="pay", after=30 * MINUTE, since="created_at", when=NOT_PAID)


def test_a_round_that_ended_long_before_does_not_come_back_with_others(declare: Declare, channel: Channel) -> None:
    """A shop closes and opens again. One object needs no timeout of this policy any more, but one of another."""
    is_open = {"channel__merchant__is_open": True}
    declare(Purchase, name="pay", after=20 * MINUTE, since="created_at", when=Q(**is_open))
    declare(Purchase, name="remind", after=MINUTE, since="channel__opens_at", when=Q(labels__is_urgent=True, **is_open))
    Channel.objects.filter(pk=channel.pk).update(opens_at=at(90))
    urgent, settled = (bought(channel=channel) for _ in range(2))
    for each in (urgent, settled):
        each.labels.add(Label.objects.create(is_urgent=True))
    assert due(urgent) == due(settled) == [20, 91]
    settled.labels.clear()
    merchant: Any = channel.merchant
    for merchant.is_open, expected in ((False, ([], [])), (True, ([20, 91], [20]))):
        merchant.save()
        assert (due(urgent), due(settled)) == expected


@pytest.mark.skipif(not connection.features.has_select_for_update, reason="SQLite locks no rows")
@pytest.mark.parametrize(
    "write",
    [
        lambda payment: Payment(purchase=payment.purchase).save(),
        lambda payment: Payment.objects.bulk_create([Payment(purchase=payment.purchase)]),
        lambda payment: Payment.objects.update(status="captured"),
        lambda payment: payment.delete(),
    ],
    ids=["save", "bulk_create", "update", "delete"],
)
def test_the_object_is_locked_before_its_row_is_written(unpaid: Any, write: Callable[[Payment], object]) -> None:
    payment = Payment.objects.create(purchase=bought())
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        write(payment)
    sqls = [query["sql"] for query in queries]
    locks = [at for at, sql in enumerate(sqls) if "testapp_purchase" in sql and "UPDATE" in sql.split("WHERE")[-1]]
    writes = [at for at, sql in enumerate(sqls) if sql.startswith(("INSERT", "UPDATE", "DELETE")) and "_payment" in sql]
    assert locks[0] < writes[0]


def test_more_objects_than_a_save_may_lock_are_left_to_the_sync_which_begins_at_once(
    declare: Declare, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    Purchase.objects.bulk_create([Purchase(channel=channel, created_at=at()) for _ in range(MOST + 1)])
    PolicySync.objects.create(policy=policy.label, oldest_label=policy.label)
    with CaptureQueriesContext(connection) as queries:
        channel.pay_within = 45 * MINUTE
        channel.save()
    assert len(queries) < 10
    assert PolicySync.objects.get(policy=policy.label).is_asked
    assert sync_policy(policy, "default").moved == MOST + 1
    assert {row.due_at for row in Timeout.objects.all()} == {at(45)}


def bulk_update(purchases: list[Purchase]) -> None:
    rows = [Payment.objects.create(purchase=each) for each in purchases]
    for row in rows:
        row.status = "captured"
    Payment.objects.bulk_update(rows, ["status"])


def move(purchases: list[Purchase]) -> None:
    """Payments of another purchase become theirs."""
    other = bought(created_at=None)
    for each in purchases:
        payment = Payment.objects.create(purchase=other, status="captured")
        Payment.objects.filter(pk=payment.pk).update(purchase=each)


WRITES: dict[str, Callable[[list[Purchase]], object]] = {
    "save": lambda purchases: [Payment.objects.create(purchase=each, status="captured") for each in purchases],
    "bulk_create": lambda purchases: Payment.objects.bulk_create(
        Payment(purchase=each, status="captured") for each in purchases
    ),
    "update": lambda purchases: (
        Payment.objects.bulk_create(Payment(purchase=each) for each in purchases),
        Payment.objects.filter(purchase__in=purchases).update(status="captured"),
    ),
    "bulk_update": bulk_update,
    "move": move,
}


@pytest.mark.parametrize("write", WRITES)
def test_each_way_to_write_arms_in_the_same_transaction(unpaid: Any, write: str) -> None:
    purchases = [bought() for _ in range(3)]
    WRITES[write](purchases)
    assert [due(each) for each in purchases] == [[], [], []]
    with suppress(KeyError), transaction.atomic():
        Payment.objects.all().delete()
        assert [due(each) for each in purchases] == [[30], [30], [30]]
        raise KeyError
    assert [due(each) for each in purchases] == [[], [], []]
    Payment.objects.bulk_create([Payment(purchase=purchases[0], status="captured") for _ in range(200)])
    with CaptureQueriesContext(connection) as queries:
        Payment.objects.all().delete()
    assert len(queries) < 20, "which arms its objects once"
    assert [due(each) for each in purchases] == [[30], [30], [30]]


def test_a_saved_payment_arms_the_purchase_that_it_belonged_to_until_now_too(unpaid: Any) -> None:
    first, second = bought(), bought()
    payment = Payment.objects.create(purchase=first, status="captured")
    for status, purchase, expected in (
        *(("captured", first, ([], [30])), ("failed", first, ([30], [30])), ("captured", second, ([30], []))),
        ("captured", first, ([], [30])),
    ):
        payment.status, payment.purchase = status, purchase
        payment.save()
        assert (due(first), due(second)) == expected
    payment.delete()
    assert (due(first), due(second)) == ([30], [30])
    Payment._base_manager.bulk_create([Payment(purchase=first, status="captured")])
    assert due(first) == [30], "it was written past the manager"
    assert sync_policy(unpaid, "default").cancelled == 1
    assert due(first) == []


IS_ROUTED = bool(settings.DATABASE_ROUTERS)
"""Django itself would read the content type of a remark from the replica."""


@pytest.fixture
def armed(declare: Declare) -> Callable[[Purchase], set[str]]:
    """Declare a policy for each kind of relation; return which of them have armed an object."""
    conditions = {
        "channel": Q(channel__merchant__is_open=True),
        "label": Q(labels__is_urgent=True),
        "unlabelled": Q(labels=None),
        "offer": Q(offer__is_valid=True),
        "merchant": Q(offers__is_open=True),
        "refund": Q(payments__refunds__is_done=True),
        "later": Q(later__status="paid"),
        **({} if IS_ROUTED else {"remark": Q(remarks__is_open=True)}),
    }
    for name, condition in conditions.items():
        declare(Purchase, name=name, after=30 * MINUTE, since="created_at", when=condition)

    def find(purchase: Purchase) -> set[str]:
        rows = Timeout.objects.waiting().filter(object_id=str(purchase.pk))
        return {row.policy.rpartition(".")[2] for row in rows}

    return find


def test_foreign_keys_are_watched_over_several_steps(armed: Any) -> None:
    merchant, other = Merchant.objects.create(), Merchant.objects.create()
    channel = Channel.objects.create(merchant=merchant)
    purchase = bought(channel=channel)
    expected = {"channel", "unlabelled"}
    assert armed(purchase) == expected
    merchant.is_open = False
    merchant.save()
    assert armed(purchase) == {"unlabelled"}
    channel.merchant = other
    channel.save()
    assert armed(purchase) == expected
    refund = Refund.objects.create(payment=Payment.objects.create(purchase=purchase), is_done=True)
    assert armed(purchase) == {*expected, "refund"}
    refund.payment.delete()
    later = bought(first=purchase, status="paid")
    assert armed(purchase) == {*expected, "later"}
    later.delete()
    assert armed(purchase) == expected
    other.delete()
    assert armed(purchase) == set(), "it is deleted, too"


def test_many_to_many_relations_are_watched_from_both_sides(armed: Any) -> None:
    purchase, label = bought(), Label.objects.create(is_urgent=True)
    purchase.labels.add(label)
    assert armed(purchase) == {"label"}
    for label.is_urgent in (False, True):
        label.save(update_fields=["is_urgent"])
        assert armed(purchase) == ({"label"} if label.is_urgent else set())
    for empty in (label.purchase_set.clear, lambda: purchase.labels.remove(label), lambda: purchase.labels.set([])):
        empty()
        assert armed(purchase) == {"unlabelled"}
        label.purchase_set.add(purchase)
        assert armed(purchase) == {"label"}
    label.delete()
    assert armed(purchase) == {"unlabelled"}


def test_rows_of_a_relation_with_columns_are_watched(armed: Any) -> None:
    purchase, merchant = bought(), Merchant.objects.create(is_open=False)
    offer, plain = Offer.objects.create(purchase=purchase, merchant=merchant), {"unlabelled"}
    assert armed(purchase) == {"offer", *plain}
    merchant.is_open = True
    merchant.save()
    assert armed(purchase) == {"offer", "merchant", *plain}
    offer.is_valid = False
    offer.save()
    assert armed(purchase) == {"merchant", *plain}
    offer.delete()
    assert armed(purchase) == plain
    purchase.offers.add(merchant)  # which inserts in bulk, without a signal of its own
    assert armed(purchase) == {"offer", "merchant", *plain}
    merchant.purchase_set.remove(purchase)
    assert armed(purchase) == plain
    merchant.purchase_set.add(purchase, through_defaults={"is_valid": False})
    assert armed(purchase) == {"merchant", *plain}
    purchase.offers.clear()
    assert armed(purchase) == plain


@pytest.mark.skipif(IS_ROUTED, reason="Django itself would read the content type from the replica")
def test_generic_relations_are_watched(armed: Any) -> None:
    purchase, kind = bought(), ContentType.objects.get_for_model(Purchase)
    remark = Remark.objects.create(content_type=kind, object_id=str(purchase.pk))
    for object_id, is_armed in ((purchase.pk, True), ("0", False), ("no number", False), (purchase.pk, True)):
        remark.object_id = str(object_id)
        remark.save()
        assert ("remark" in armed(purchase)) is is_armed
    remark.delete()
    assert "remark" not in armed(purchase)


def test_columns_that_no_policy_reads_are_not_watched(declare: Declare, channel: Channel) -> None:
    declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    bought(channel=channel)
    with CaptureQueriesContext(connection) as queries:
        channel.hours = 3
        channel.save(update_fields=["hours"])
        Channel.objects.update(hours=4)
    assert len(queries) == 2


def test_what_cannot_be_watched_and_bulk_writes_that_are_not_noticed_are_named_by_checks(declare: Declare) -> None:
    declare(Purchase, name="pay", after="channel__pay_within", since="created_at", when=Q(labels__is_urgent=True))
    found = next(message.msg for message in check_bulk_writes() if message.id == "django_delayq.I002")
    assert "testapp.Label" in found and "testapp.Channel" not in found
    declare(Purchase, name="watched", after=30 * MINUTE, since="created_at", when=NOT_PAID)
    assert "django_delayq.W001" not in [message.id for message in check_policies()]
    captured = Payment.objects.filter(purchase=OuterRef("pk"), status="captured")
    hidden = Q(channel__pay_within__isnull=False) & ~Exists(captured)
    policy = declare(Purchase, name="hidden", after=30 * MINUTE, since="created_at", when=hidden)
    [message] = [message for message in check_policies() if message.id == "django_delayq.W001"]
    assert message.obj == policy and "sync_timeouts(" in str(message.hint)
