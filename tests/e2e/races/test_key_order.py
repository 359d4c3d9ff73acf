"""The order of keys, in which objects are locked, is that of the database. Python may sort them in another one."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq.arming.receivers import ArmingQuerySet
from django_delayq.ledger.paging import CHUNK
from tests.e2e.races.sessions import Session, needs_row_locks
from tests.testapp.models import Voucher

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True), needs_row_locks]


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
