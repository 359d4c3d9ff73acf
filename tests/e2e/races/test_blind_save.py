"""A read and a later `save()` lose an update. The safe ways to pay: `test_paying.py`."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.e2e.races.paying import pay_blindly
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
