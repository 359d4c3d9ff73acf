"""The order in which objects are locked: keys as the database sorts them, and parents before their children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.receivers import ArmingQuerySet
from django_delayq.sql.statements import CHUNK
from tests.e2e.races.sessions import Session, needs_row_locks
from tests.testapp.models import ExpressOrder, Order, Voucher

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True), needs_row_locks]


def test_an_update_of_two_pages_locks_in_the_order_of_the_database() -> None:
    """MariaDB sorts letters without regard to case, PostgreSQL by its locale, and Python all capitals first."""
    Voucher.objects.bulk_create(Voucher(code=code) for code in ["a", *(f"B{number}" for number in range(CHUNK))])
    codes = list(Voucher.objects.order_by("pk").values_list("pk", flat=True))
    with transaction.atomic():
        Voucher.objects.filter(pk="a").update(status="used")
        session = Session(lambda: ArmingQuerySet(Voucher).update(issued_at=timezone.now()))
        session.wait_until_it_waits()
        Voucher.objects.filter(pk__in=codes[codes.index("a") + 1 :][-1:]).update(status="used")
    session.end()
    assert Voucher.objects.filter(issued_at__isnull=False).count() == CHUNK + 1


def test_what_locks_the_parent_of_a_child_before_the_child_does_not_deadlock(declare: Callable[..., Any]) -> None:
    """As docs/databases.md advises: a statement that locks both locks the child's row first."""
    declare(ExpressOrder, name="of_child")
    express = ExpressOrder.objects.create()

    def lock_both() -> None:
        with transaction.atomic():
            Order.objects.select_for_update().get(pk=express.pk)
            ExpressOrder.objects.select_for_update().get(pk=express.pk)

    with transaction.atomic():
        Order.objects.filter(pk=express.pk).update(note="saving")
        session = Session(lock_both)
        session.wait_until_it_waits()
        assert dq.schedule_timeout(express, "of_child", hours=1).pk
    session.end()
