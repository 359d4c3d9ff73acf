"""What the next round, which takes the slot of one that is firing outside a transaction, does to its attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import plan, run, settle_expired
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import Timeout
from tests.e2e.races.sessions import Session, needs_row_locks
from tests.e2e.races.stage import PATIENCE
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True), needs_row_locks]


def test_a_failed_attempt_waits_for_no_transaction_that_has_scheduled_the_next_round(
    declare: Callable[..., Any],
) -> None:
    """It would hold its row meanwhile, for which that transaction may wait."""
    began, may_fail, tried = threading.Event(), threading.Event(), threading.Semaphore(0)

    def fail(order: Order, timeout: Timeout) -> None:
        began.set()
        assert may_fail.wait(PATIENCE)
        raise RuntimeError("no answer")

    policy, order = declare(Order, fail, name="outside", atomic=False), Order.objects.create()
    works, _ = plan({dq.schedule_timeout(order, policy, seconds=0).pk: 1}, "default")
    set_checkpoint_hook(lambda step: tried.release() if step == "undone" else None)
    try:
        worker = Session(lambda: run(works[0], "default"))
        assert began.wait(PATIENCE)
        with transaction.atomic():
            dq.schedule_timeout(order, policy, hours=1)
            may_fail.set()
            assert tried.acquire(timeout=PATIENCE)
            assert tried.acquire(timeout=PATIENCE)  # again, so the first one did not wait for the slot
            assert dq.cancel_timeouts(order.timeouts.all()) == 1
        worker.end()
    finally:
        set_checkpoint_hook(None)
    rows = Timeout.objects.order_by("pk").values_list("state", "cause", "attempts")
    assert list(rows) == [("cancelled", "hand", 1), ("cancelled", "hand", 0)]


def test_an_expired_row_whose_slot_is_being_taken_keeps_none_behind_it_from_being_settled(
    declare: Callable[..., Any],
) -> None:
    policy, orders = declare(Order, name="outside", atomic=False), [Order.objects.create() for _ in range(2)]
    rows = [dq.schedule_timeout(order, policy, seconds=0).pk for order in orders]
    for seconds, row in zip((20, 10), rows, strict=True):
        died_at = timezone.now() - timedelta(seconds=seconds)
        Timeout.objects.filter(pk=row).update(state="firing", slot_taken=None, attempts=1, run_at=died_at)
    with transaction.atomic():
        dq.schedule_timeout(orders[0], policy, hours=1)
        Session(lambda: settle_expired("default")).end()
    found = Timeout.objects.filter(pk__in=rows).order_by("pk")
    assert [row.state for row in found] == ["firing", "pending"]
