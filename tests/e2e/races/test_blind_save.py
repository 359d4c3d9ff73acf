"""A read and a later `save()` lose an update. The safe ways to pay: `test_paying.py`."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_delayq.testing import fire_due
from tests.e2e.races.paying import pay_blindly
from tests.testapp.models import Effect, Order


@pytest.mark.dialect
@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_blind_save_pays_an_order_that_has_been_cancelled() -> None:
    order = Order.objects.create(created_at=timezone.now() - timedelta(minutes=30))
    as_read_by_a_view = Order.objects.get(pk=order.pk)
    assert fire_due() == 1
    assert pay_blindly(as_read_by_a_view), "the payer believes that it was in time"
    order.refresh_from_db()
    ends = order.status, order.timeouts.get().state, Effect.objects.count()
    assert ends == ("paid", "fired", 1), "both: a lost update that no library can stop"
