"""What saving and syncing arm, move, cancel, leave alone, refuse and lock."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core import serializers
from django.db import connection, transaction
from django.db.models import Q
from django.db.models.signals import post_save
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock
from django_delayq.arming.sync import Synced, automatic_policies, sync_policy
from django_delayq.models import Timeout
from django_delayq.policy.declaring import timeout_policy
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.integration.operations.conftest import as_if
from tests.support.seen import heard, sql_of
from tests.support.typed import Declare
from tests.testapp.models import Order, Plain, Voucher

pytestmark = pytest.mark.django_db(transaction=True)
HALF_HOUR = timedelta(minutes=30)


@pytest.fixture
def now() -> datetime:
    return timezone.now().replace(microsecond=123456)


@pytest.fixture
def order(now: datetime) -> Order:
    """An order whose timeout is armed by saving it, due in thirty minutes."""
    return Order.objects.create(status="unpaid", created_at=now)


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


def test_null_in_the_condition_counts_as_false(declare: Declare, now: datetime) -> None:
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
        ({"after": -HALF_HOUR}, "negative without since, but is -30 min"),
        ({"batch": True}, "batch"),
        ({"batch": 5, "atomic": False}, "batch needs atomic"),
        ({"together": 5, "atomic": False}, "together needs atomic"),
        ({"together": 5, "batch": 5}, "but not both"),
        ({"max_extensions": -1}, "max_extensions"),
        ({"aliases": ["a.b"]}, "aliases"),
        *(({option: value}, option) for option in ("aliases", "search") for value in ((1,), 1, None)),
        ({"name": "has space"}, "name"),
    ],
)
def test_a_wrong_declaration_is_refused_with_a_hint(declare: Declare, options: dict[str, Any], message: str) -> None:
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


def test_a_round_with_a_key_is_left_alone_and_does_not_stand_in_for_the_automatic_one(now: datetime) -> None:
    Order.objects.bulk_create([Order(status="unpaid", created_at=now)])
    order = Order.objects.get()
    keyed = dq.schedule_timeout(order, "cancel_unpaid", key="by hand", minutes=90)
    assert dq.sync_timeouts(order) == 1
    save(order, status="paid")
    assert list(dq.pending_timeouts(order)) == [keyed]
    assert [row.state for row in rounds()] == ["pending", "cancelled"]


def test_a_sync_locks_the_rows_before_it_decides(order: Order) -> None:
    """Otherwise it would arm what a transaction that commits in between has just paid."""
    Order.objects.update(status="paid")
    sent = sql_of(lambda: dq.sync_timeouts(Order.objects.all()))
    reads = [sql for sql in sent if re.search(r"FROM [`\"]testapp_order[`\"]", sql)]
    locking, deciding = (next(i for i, sql in enumerate(reads) if word(sql)) for word in (_locks, _decides))
    assert locking < deciding


def _locks(sql: str) -> bool:
    if connection.features.has_select_for_update:
        return "FOR UPDATE" in sql or "FOR NO KEY UPDATE" in sql
    return bool(re.search(r"WHERE [`\"]testapp_order[`\"]\.[`\"]id[`\"] IN \(\d+\)", sql)) and not _decides(sql)


def _decides(sql: str) -> bool:
    """Whether the statement evaluates the condition of the policy."""
    return "CASE" in sql


@pytest.mark.skipif(connection.vendor != "sqlite", reason="other databases have a type for datetimes")
@pytest.mark.parametrize("written", ["{:%Y-%m-%d %H:%M:%S}.120", "{:%Y-%m-%dT%H:%M:%S}.12Z"])
@pytest.mark.parametrize("how", ["save", "save in a transaction", "sync of the table"])
def test_a_datetime_that_raw_sql_has_written_closes_its_round_too(declare: Declare, written: str, how: str) -> None:
    """SQLite compares strings, and `strftime('%f')` writes milliseconds: each save armed the fired round again."""
    policy = declare(Order, name="raw", after=timedelta(minutes=5), since="created_at", when=Q(status="raw"))
    at = written.format(timezone.now().astimezone(UTC))
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO testapp_order (status, created_at) VALUES ('raw', %s)", [at])
    order = Order.objects.get(status="raw")
    assert dq.sync_timeouts(order) == 1
    Timeout.objects.update(state="fired", cause="due", slot_taken=None, settled_at=timezone.now())
    if how == "sync of the table":
        sync_policy(policy, "default")
    else:
        with transaction.atomic() if how == "save in a transaction" else nullcontext():
            order.save(update_fields=["status"])
    assert Timeout.objects.count() == 1
    Order.objects.filter(pk=order.pk).update(created_at=timezone.now() + timedelta(minutes=1))
    order.save(update_fields=["status"])
    assert Timeout.objects.filter(state="pending").count() == 1, "another value begins another round"


def test_a_save_sends_the_signals_of_what_it_did(now: datetime) -> None:
    with heard("scheduled", "rescheduled", "cancelled") as got:
        order = Order.objects.create(status="unpaid", created_at=now)
        (row,) = rounds()
        save(order, created_at=now + timedelta(minutes=1))
        save(order, status="paid")
    assert got == [("scheduled", row), ("rescheduled", row), ("cancelled", row)]


@pytest.mark.dialect
@pytest.mark.parametrize("how", ["save", "save in a transaction", "sync"])
def test_a_condition_on_a_day_means_that_of_the_project_whatever_zone_a_request_has(declare: Declare, how: str) -> None:
    """Otherwise that of the customer whose save was the first in this process would count for all."""
    if not connection.features.has_zoneinfo_database:
        pytest.skip("the server has no tables of time zones")
    monday = datetime(2026, 3, 2, 20, tzinfo=UTC)  # in Tokyo it is Tuesday
    when = Q(status="open", created_at__week_day=2)
    policy = declare(Order, name="mondays", after=timedelta(hours=1), since="created_at", when=when)
    fields: dict[str, Any] = {"status": "open", "created_at": monday}
    with clock.set_to(monday):
        with timezone.override("Asia/Tokyo"):
            if how == "sync":
                Order.objects.bulk_create([Order(**fields)])
                dq.sync_timeouts(Order.objects.filter(status="open"))
            else:
                with transaction.atomic() if how == "save in a transaction" else nullcontext():
                    Order.objects.create(**fields)
        Order.objects.create(**fields)
        assert dq.pending_timeouts(Order, policy).count() == 2
    with clock.set_to(monday + timedelta(hours=1)), timezone.override("Asia/Tokyo"):
        assert fire_due(policy) == 2


def test_a_policy_that_is_declared_after_the_start_is_armed_by_saving() -> None:
    """As in `AppConfig.ready()` of an app that follows this one in INSTALLED_APPS."""
    post_save.disconnect(sender=Voucher, dispatch_uid="django_delayq.arm_saved")
    declare = timeout_policy(Voucher, name="end", after=timedelta(days=1), since="issued_at", when=Q(status="open"))
    policy = declare(lambda voucher, timeout: None)
    try:
        voucher = Voucher.objects.create(code="late", issued_at=timezone.now())
        assert dq.get_deadline(voucher, "end") is not None
        voucher.delete()
        assert not dq.pending_timeouts(policy=policy).exists()
    finally:
        registry.remove(policy)
