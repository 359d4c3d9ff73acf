"""Before a watched row is locked or written, its owner is locked: the order of a firing, and of saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from django_delayq.backoff import LogInterval
from django_delayq.ledger import db_connections
from tests.e2e.races.sessions import cross, needs_row_locks
from tests.support.purchases import Declare
from tests.testapp.market import Payment, Purchase
from tests.testapp.timeouts import LOSE_UNPAID, lose

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True), needs_row_locks]

Payments = list[Any]
"""Of `Payment`."""


@pytest.fixture
def payments(declare: Declare) -> Payments:
    """Two payments, in the order of their keys. Their purchases have the opposite order."""
    declare(Purchase, lose, name="lose_unpaid", **LOSE_UNPAID)
    second, first = Purchase.objects.create(), Purchase.objects.create()
    return [Payment.objects.create(purchase=purchase) for purchase in (first, second)]


def lock(purchase: int) -> None:
    Purchase.objects.select_for_update().get(pk=purchase)


def save_each(rows: Any) -> None:
    for payment in rows:
        payment.status = "failed"
        payment.save()


# That each other way to write does so, too: tests/integration/arming/test_watched.py.
WRITES: dict[str, Callable[[Payments], object]] = {
    "update_or_create": lambda some: Payment.objects.update_or_create(pk=some[0].pk, defaults={"status": "failed"}),
    "of_its_owner": lambda some: some[0].purchase.payments.update_or_create(pk=some[0].pk, defaults={"status": "x"}),
    "iterator": lambda some: save_each(Payment.objects.select_for_update().filter(pk=some[0].pk).iterator()),
    "delete": lambda some: Payment.objects.filter(pk=some[0].pk).delete(),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_locks_a_watched_row_locks_its_owner_first(payments: Payments, write: str) -> None:
    """A firing has locked the owner, and its handler writes the row that the request wants, too."""
    cross(
        transaction.atomic(lambda: WRITES[write](payments)),
        first=lambda: lock(payments[0].purchase_id),
        then=lambda: Payment._base_manager.filter(pk=payments[0].pk).update(status="void"),
    )


BULK: dict[str, Callable[[Payments], object]] = {
    "bulk_update": lambda some: Payment.objects.bulk_update(some, ["status"], batch_size=1),
    "delete": lambda some: Payment.objects.filter(pk__in=[each.pk for each in some]).delete(),
    "select_for_update": lambda some: save_each(Payment.objects.select_for_update().order_by("pk")),
}


@pytest.mark.parametrize("write", BULK)
def test_what_writes_several_watched_rows_locks_their_owners_in_the_order_of_their_keys(
    payments: Payments, write: str
) -> None:
    first, second = Purchase.objects.order_by("pk")
    act = transaction.atomic(lambda: BULK[write](payments))
    cross(act, first=lambda: lock(first.pk), then=lambda: lock(second.pk))


@pytest.mark.usefixtures("counted_deadlocks")
def test_a_deadlock_of_an_owner_is_logged_once_with_the_page_that_explains_it(
    payments: Payments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without our manager only the requests that deadlock show that they lock in another order."""
    monkeypatch.setattr(db_connections, "_explained", LogInterval(float("inf")))
    caplog.set_level(logging.WARNING, "django_delayq.arming")
    lost = 0

    def write(some: Payments) -> None:
        nonlocal lost
        try:
            with transaction.atomic():
                save_each(some)
        except OperationalError:
            lost += 1

    for _ in range(2):
        cross(
            lambda: write(payments[::-1]),
            first=lambda: lock(payments[0].purchase_id),
            then=lambda: write(payments[1:]),
        )
    logged = [record.getMessage() for record in caplog.records if record.event == "owner_deadlock"]  # type: ignore[attr-defined]
    assert (lost, len(logged)) == (2, 1), connection.vendor
    assert "page on races" in logged[0]
