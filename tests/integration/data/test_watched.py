"""Rows that a policy reads beside its object: writing them arms, moves, holds and cancels as saving the object does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings
from django.contrib.contenttypes.models import ContentType
from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q
from django.test.utils import CaptureQueriesContext

import django_delayq as dq
from django_delayq.arming.sync import sync_policy
from django_delayq.arming.watched import MOST
from django_delayq.checks import check_bulk_writes, check_policies
from django_delayq.models import PolicySync, Timeout
from tests.integration.data.conftest import MINUTE, UNPAID, Declare, at, bought, due
from tests.testapp.market import Channel, Label, Merchant, Offer, Payment, Purchase, Refund, Remark

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
NOT_PAID = ~Q(payments__status="captured")


@pytest.fixture
def unpaid(declare: Declare) -> Any:
    return declare(Purchase, name="pay", after=30 * MINUTE, since="created_at", when=NOT_PAID)


def test_a_payment_cancels_and_a_failed_one_arms_again(unpaid: Any) -> None:
    first, second = bought(), bought()
    payment = Payment.objects.create(purchase=first, status="captured")
    assert (due(first), due(second)) == ([], [30])
    payment.status = "failed"
    payment.save()
    assert (due(first), due(second)) == ([30], [30])
    payment.status, payment.purchase = "captured", second
    payment.save()
    assert (due(first), due(second)) == ([30], [])
    payment.purchase = first  # the one that it belonged to until now is armed, too
    payment.save()
    assert (due(first), due(second)) == ([], [30])
    payment.delete()
    assert (due(first), due(second)) == ([30], [30])


def test_a_round_that_ended_long_before_is_left_alone_when_others_with_the_same_since_come_back(
    declare: Declare, channel: Channel
) -> None:
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


def by_save(purchases: list[Purchase], status: str) -> None:
    for each in purchases:
        Payment(purchase=each, status=status).save()


def by_bulk_create(purchases: list[Purchase], status: str) -> None:
    Payment.objects.bulk_create([Payment(purchase=each, status=status) for each in purchases])


def by_update(purchases: list[Purchase], status: str) -> None:
    by_save(purchases, "new")
    assert Payment.objects.filter(purchase__in=purchases).update(status=status) == len(purchases)


def by_bulk_update(purchases: list[Purchase], status: str) -> None:
    by_save(purchases, "new")
    rows = list(Payment.objects.all())
    for row in rows:
        row.status = status
    Payment.objects.bulk_update(rows, ["status"])


def by_moving(purchases: list[Purchase], status: str) -> None:
    other = bought(created_at=None)
    Payment.objects.create(purchase=other, status=status)
    for each in purchases:
        Payment.objects.create(purchase=other, status=status)
        Payment.objects.filter(pk=Payment.objects.latest("pk").pk).update(purchase=each)


@pytest.mark.parametrize("write", [by_save, by_bulk_create, by_update, by_bulk_update, by_moving])
def test_each_way_to_write_arms_in_the_same_transaction(unpaid: Any, write: Callable[..., None]) -> None:
    purchases = [bought() for _ in range(3)]
    write(purchases, "captured")
    assert [due(each) for each in purchases] == [[], [], []]
    try:
        with transaction.atomic():
            Payment.objects.all().delete()
            assert [due(each) for each in purchases] == [[30], [30], [30]]
            raise KeyError
    except KeyError:
        pass
    assert [due(each) for each in purchases] == [[], [], []]
    Payment.objects.all().delete()
    assert [due(each) for each in purchases] == [[30], [30], [30]]


@pytest.mark.skipif(not connection.features.has_select_for_update, reason="SQLite locks no rows")
@pytest.mark.parametrize("write", ["save", "bulk_create", "update", "delete"])
def test_the_object_is_locked_before_its_row_is_written(unpaid: Any, write: str) -> None:
    purchase = bought()
    payment = Payment.objects.create(purchase=purchase)
    acts: dict[str, Callable[[], Any]] = {
        "save": lambda: Payment(purchase=purchase).save(),
        "bulk_create": lambda: Payment.objects.bulk_create([Payment(purchase=purchase)]),
        "update": lambda: Payment.objects.update(status="captured"),
        "delete": payment.delete,
    }
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        acts[write]()
    sqls = [query["sql"] for query in queries]
    locks = [at for at, sql in enumerate(sqls) if "testapp_purchase" in sql and "UPDATE" in sql.split("WHERE")[-1]]
    writes = [at for at, sql in enumerate(sqls) if sql.startswith(("INSERT", "UPDATE", "DELETE")) and "_payment" in sql]
    assert locks[0] < writes[0]


def test_rows_that_are_written_past_the_manager_are_found_by_the_sync(unpaid: Any) -> None:
    purchase = bought()
    Payment._base_manager.bulk_create([Payment(purchase=purchase, status="captured")])
    assert due(purchase) == [30]
    assert sync_policy(unpaid, "default").cancelled == 1
    assert due(purchase) == []


@pytest.fixture
def armed(declare: Declare) -> Callable[[Purchase], set[str]]:
    """Declare a policy for each kind of relation; return which of them have armed an object."""
    conditions = {
        "channel": Q(channel__merchant__is_open=True),
        "label": Q(labels__is_urgent=True),
        "unlabelled": Q(labels=None),
        "offer": Q(offer__is_valid=True),
        "merchant": Q(offers__is_open=True),
        "remark": Q(remarks__is_open=True),
        "refund": Q(payments__refunds__is_done=True),
        "later": Q(later__status="paid"),
    }
    if settings.DATABASE_ROUTERS:  # Django itself would read the content type from the replica
        del conditions["remark"]
    for name, condition in conditions.items():
        declare(Purchase, name=name, after=30 * MINUTE, since="created_at", when=condition)

    def find(purchase: Purchase) -> set[str]:
        rows = Timeout.objects.waiting().filter(object_id=str(purchase.pk))
        return {row.policy.rpartition(".")[2] for row in rows} - {"unlabelled"}

    return find


def test_foreign_keys_are_watched_over_several_steps(armed: Any) -> None:
    merchant = Merchant.objects.create()
    channel = Channel.objects.create(merchant=merchant)
    purchase = bought(channel=channel)
    assert armed(purchase) == {"channel"}
    merchant.is_open = False
    merchant.save()
    assert armed(purchase) == set()
    channel.merchant = other = Merchant.objects.create()
    channel.save()
    assert armed(purchase) == {"channel"}
    refund = Refund.objects.create(payment=Payment.objects.create(purchase=purchase), is_done=True)
    assert armed(purchase) == {"channel", "refund"}
    refund.payment.delete()
    assert armed(purchase) == {"channel"}
    later = bought(first=purchase, status="paid")
    assert armed(purchase) == {"channel", "later"}
    later.delete()
    assert armed(purchase) == {"channel"}
    other.delete()
    assert not Timeout.objects.waiting().filter(object_id=str(purchase.pk)).exists()


def test_many_to_many_relations_are_watched_from_both_sides(armed: Any) -> None:
    purchase, label = bought(), Label.objects.create(is_urgent=True)
    purchase.labels.add(label)
    assert armed(purchase) == {"label"}
    label.is_urgent = False
    label.save()
    assert armed(purchase) == set()
    label.is_urgent = True
    label.save(update_fields=["is_urgent"])
    assert armed(purchase) == {"label"}
    for empty in (label.purchase_set.clear, lambda: purchase.labels.remove(label), lambda: purchase.labels.set([])):
        empty()
        assert armed(purchase) == set()
        assert due(purchase) == [30]  # it is unlabelled
        label.purchase_set.add(purchase)
        assert armed(purchase) == {"label"}
        assert due(purchase) == [30]
    label.delete()
    assert armed(purchase) == set()
    assert due(purchase) == [30]


def test_rows_of_a_relation_with_columns_are_watched(armed: Any) -> None:
    purchase, merchant = bought(), Merchant.objects.create(is_open=False)
    offer = Offer.objects.create(purchase=purchase, merchant=merchant)
    assert armed(purchase) == {"offer"}
    merchant.is_open = True
    merchant.save()
    assert armed(purchase) == {"offer", "merchant"}
    offer.is_valid = False
    offer.save()
    assert armed(purchase) == {"merchant"}
    offer.delete()
    assert armed(purchase) == set()
    purchase.offers.add(merchant)  # which inserts in bulk, without a signal of its own
    assert armed(purchase) == {"offer", "merchant"}
    merchant.purchase_set.remove(purchase)
    assert armed(purchase) == set()
    merchant.purchase_set.add(purchase, through_defaults={"is_valid": False})
    assert armed(purchase) == {"merchant"}
    purchase.offers.clear()
    assert armed(purchase) == set()


@pytest.mark.skipif(
    bool(settings.DATABASE_ROUTERS), reason="Django itself would read the content type from the replica"
)
def test_generic_relations_are_watched(armed: Any) -> None:
    purchase, kind = bought(), ContentType.objects.get_for_model(Purchase)
    remark = Remark.objects.create(content_type=kind, object_id=str(purchase.pk))
    assert armed(purchase) == {"remark"}
    for object_id in ("0", "no number"):
        remark.object_id = object_id
        remark.save()
        assert armed(purchase) == set()
    remark.about = purchase
    remark.save()
    assert armed(purchase) == {"remark"}
    remark.delete()
    assert armed(purchase) == set()


def test_the_terms_of_a_channel_move_its_deadlines(declare: Declare, channel: Channel) -> None:
    declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    first, second = bought(channel=channel), bought(channel=channel)
    other = bought(channel=Channel.objects.create(pay_within=5 * MINUTE))
    dq.reschedule_timeout(second, "pay", minutes=50)
    channel.pay_within = 45 * MINUTE
    channel.save()
    assert [due(each) for each in (first, second, other)] == [[45], [50], [5]]
    Channel.objects.filter(pk=channel.pk).update(pay_within=20 * MINUTE)
    assert [due(each) for each in (first, second, other)] == [[20], [50], [5]]
    first.channel = other.channel
    first.save()
    assert due(first) == [5]


def test_the_start_of_another_row_is_watched(declare: Declare, channel: Channel) -> None:
    declare(Purchase, name="remind", after=-10 * MINUTE, since="channel__opens_at", when=Q(status="unpaid"))
    purchase = bought(channel=channel)
    assert due(purchase) == []
    for minutes in (60, 90):
        channel.opens_at = at(minutes)
        channel.save(update_fields=["opens_at"])
        assert due(purchase) == [minutes - 10]


def test_a_related_row_stops_the_clock(declare: Declare) -> None:
    options = {"after": 30 * MINUTE, "since": "created_at", "when": Q(status="unpaid")}
    declare(Purchase, name="pay", hold_when=Q(payments__status="pending"), **options)
    purchase = bought()
    payment = Payment.objects.create(purchase=purchase, status="pending")
    assert Timeout.objects.get().state == "held"
    payment.delete()
    assert Timeout.objects.get().state == "pending"


def test_columns_that_no_policy_reads_cost_nothing(unpaid: Any, declare: Declare, channel: Channel) -> None:
    declare(Purchase, name="channel", after="channel__pay_within", **UNPAID)
    bought(channel=channel)
    with CaptureQueriesContext(connection) as queries:
        channel.hours = 3
        channel.save(update_fields=["hours"])
    assert len(queries) == 1
    with CaptureQueriesContext(connection) as queries:
        Channel.objects.update(hours=4)
    assert len(queries) == 1


def test_deleting_many_rows_arms_their_objects_once(unpaid: Any) -> None:
    purchase = bought()
    Payment.objects.bulk_create([Payment(purchase=purchase, status="captured") for _ in range(200)])
    with CaptureQueriesContext(connection) as queries:
        Payment.objects.all().delete()
    assert due(purchase) == [30]
    assert len(queries) < 20


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


def test_watched_models_whose_bulk_writes_are_not_noticed_are_named_by_a_check(declare: Declare) -> None:
    declare(Purchase, name="pay", after="channel__pay_within", since="created_at", when=Q(labels__is_urgent=True))
    found = next(message.msg for message in check_bulk_writes() if message.id == "django_delayq.I002")
    assert "testapp.Label" in found
    assert "testapp.Channel" not in found


def test_what_cannot_be_watched_is_named_by_a_check(declare: Declare) -> None:
    captured = Payment.objects.filter(purchase=OuterRef("pk"), status="captured")
    declare(Purchase, name="watched", after=30 * MINUTE, since="created_at", when=NOT_PAID)
    assert "django_delayq.W001" not in [message.id for message in check_policies()]
    hidden = Q(channel__pay_within__isnull=False) & ~Exists(captured)
    policy = declare(Purchase, name="hidden", after=30 * MINUTE, since="created_at", when=hidden)
    found = [message for message in check_policies() if message.id == "django_delayq.W001"]
    assert [message.obj for message in found] == [policy]
    assert "sync_timeouts(" in str(found[0].hint)
