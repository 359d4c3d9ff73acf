"""A read and a later `save()` lose an update: the same timing for the wrong way to pay and the safe ones.

A view reads an unpaid order. Before it decides, the deadline passes and the order is cancelled.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.e2e.races.paying import RIGHT_WAYS, pay_blindly
from tests.e2e.races.sessions import Session
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def order() -> Order:
    """Return an unpaid order as a view has read it, with a deadline that has passed."""
    pk = Order.objects.create(created_at=timezone.now() - timedelta(minutes=30)).pk
    return Order.objects.get(pk=pk)


def ends(order: Order) -> tuple[str, str, int]:
    """Return the status of the order, the state of its timeout, and the number of effects."""
    order.refresh_from_db()
    return order.status, Timeout.objects.get(object_id=str(order.pk)).state, Effect.objects.count()


def test_a_blind_save_pays_an_order_that_has_been_cancelled(order: Order) -> None:
    assert fire_due() == 1
    assert pay_blindly(order), "the payer believes that it was in time"
    assert ends(order) == ("paid", "fired", 1), "both: a lost update that no library can stop"


@pytest.mark.skipif(connection.vendor == "sqlite", reason="its transaction locks the whole database")
def test_a_transaction_alone_makes_a_blind_save_no_better(order: Order) -> None:
    with transaction.atomic():
        read = Order.objects.get(pk=order.pk)
        Session(fire_due).end()
        assert pay_blindly(read)
    assert ends(order) == ("paid", "fired", 1)


@pytest.mark.parametrize("way", RIGHT_WAYS)
def test_every_right_way_to_pay_keeps_the_timeout_from_firing_or_learns_that_it_is_too_late(
    order: Order, way: str
) -> None:
    assert RIGHT_WAYS[way](order)
    assert fire_due() == 0
    status, state, effects = ends(order)
    assert (status, effects) == ("paid", 0) and state in {"cancelled", "skipped"}
    late = Order.objects.get(pk=Order.objects.create(created_at=order.created_at).pk)
    assert fire_due() == 1
    assert not RIGHT_WAYS[way](late)
    assert ends(late) == ("cancelled", "fired", 1)
