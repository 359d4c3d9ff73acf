"""What saving and syncing leave alone, refuse and lock."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.db.models.signals import post_save
from django.utils import timezone

from django_delayq import clock, get_deadline, pending_timeouts, schedule_timeout, sync_timeouts
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from django_delayq.policy.declaring import timeout_policy
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.support.seen import heard, sql_of
from tests.testapp.models import Order, Voucher

pytestmark = pytest.mark.django_db


@pytest.fixture
def order() -> Order:
    """An order whose timeout is armed by saving it, due in thirty minutes."""
    return Order.objects.create(status="unpaid", created_at=timezone.now())


def automatic(order: Order) -> Timeout:
    """Return the newest round that was armed by the policy."""
    return Timeout.objects.filter(object_id=str(order.pk), policy="testapp.order.cancel_unpaid", key="").latest("pk")


def test_a_round_with_a_key_is_left_alone_and_does_not_stand_in_for_the_automatic_one() -> None:
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
    order = Order.objects.get()
    keyed = schedule_timeout(order, "cancel_unpaid", key="by hand", minutes=90)
    assert sync_timeouts(order) == 1
    assert automatic(order).state == "pending"
    order.status = "paid"
    order.save()
    assert list(pending_timeouts(order)) == [keyed]
    assert automatic(order).state == "cancelled"


def test_a_sync_locks_the_rows_before_it_decides(order: Order) -> None:
    """Otherwise it would arm what a transaction that commits in between has just paid."""
    Order.objects.update(status="paid")
    sent = sql_of(lambda: sync_timeouts(Order.objects.all()))
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


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="other databases have a type for datetimes")
@pytest.mark.parametrize("written", ["{:%Y-%m-%d %H:%M:%S}.120", "{:%Y-%m-%dT%H:%M:%S}.12Z"])
@pytest.mark.parametrize("how", ["save", "save in a transaction", "sync of the table"])
def test_a_datetime_that_raw_sql_has_written_closes_its_round_too(declare: Any, written: str, how: str) -> None:
    """SQLite compares strings, and `strftime('%f')` writes milliseconds: each save armed the fired round again."""
    policy = declare(Order, name="raw", after=timedelta(minutes=5), since="created_at", when=Q(status="raw"))
    at = written.format(timezone.now().astimezone(UTC))
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO testapp_order (status, created_at) VALUES ('raw', %s)", [at])
    order = Order.objects.get(status="raw")
    assert sync_timeouts(order) == 1
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


@pytest.mark.django_db(transaction=True)
def test_a_save_sends_the_signals_of_what_it_did() -> None:
    with heard("scheduled", "rescheduled", "cancelled") as got:
        order = Order.objects.create(status="unpaid", created_at=timezone.now())
        row = automatic(order)
        order.created_at = timezone.now() + timedelta(minutes=1)
        order.save()
        order.status = "paid"
        order.save()
    assert got == [("scheduled", row), ("rescheduled", row), ("cancelled", row)]


@pytest.mark.dialect
@pytest.mark.parametrize("how", ["save", "save in a transaction", "sync"])
def test_a_condition_on_a_day_means_that_of_the_project_whatever_zone_a_request_has(declare: Any, how: str) -> None:
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
                sync_timeouts(Order.objects.filter(status="open"))
            else:
                with transaction.atomic() if how == "save in a transaction" else nullcontext():
                    Order.objects.create(**fields)
        Order.objects.create(**fields)
        assert pending_timeouts(Order, policy).count() == 2
    with clock.set_to(monday + timedelta(hours=1)), timezone.override("Asia/Tokyo"):
        assert fire_due(policy) == 2


def test_a_policy_that_is_declared_after_the_start_is_armed_by_saving() -> None:
    """As in `AppConfig.ready()` of an app that follows this one in INSTALLED_APPS."""
    post_save.disconnect(sender=Voucher, dispatch_uid="django_delayq.arm_saved")
    declare = timeout_policy(Voucher, name="end", after=timedelta(days=1), since="issued_at", when=Q(status="open"))
    policy = declare(lambda voucher, timeout: None)
    try:
        voucher = Voucher.objects.create(code="late", issued_at=timezone.now())
        assert get_deadline(voucher, "end") is not None
        voucher.delete()
        assert not pending_timeouts(policy=policy).exists()
    finally:
        registry.remove(policy)
