"""A pending round that is not the newest: what answers "it will not fire" cancels it with those that came after it.

An old dead round may be made pending in SQL after a newer one has settled.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq import timeout_cancelled
from django_delayq.contrib.countdown import countdown_of
from django_delayq.ledger import writing
from django_delayq.ledger.history import record
from django_delayq.models import Timeout
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)
DEAD = {"state": "dead", "cause": "retries", "slot_taken": None, "settled_at": timezone.now()}


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new", created_at=timezone.now())


@pytest.fixture
def cancelled() -> Iterator[list[int]]:
    """The ids of the rows for which `timeout_cancelled` was sent."""
    ids: list[int] = []

    def remember(sender: Any, timeout: Timeout, **_: Any) -> None:
        ids.append(timeout.pk)

    timeout_cancelled.connect(remember)
    yield ids
    timeout_cancelled.disconnect(remember)


def revived(order: Order, newer: str = "cancelled") -> Timeout:
    """Return a pending row that was made so by hand, in SQL, after a newer one settled as `newer`."""
    old = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=old.pk).update(**DEAD)
    new = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=new.pk).update(
        **DEAD | {"state": newer, "cause": "hand" if newer == "cancelled" else "gone"}
    )
    old.refresh_from_db()
    record(old, "retried", timezone.now(), by="ada")
    with transaction.atomic():
        writing.revive([old], "default", timezone.now())
    return old


def states() -> list[str]:
    return list(Timeout.objects.order_by("id").values_list("state", flat=True))


@pytest.mark.parametrize("newer", ["cancelled", "skipped", "dead"])
@pytest.mark.parametrize("way", ["cancel", "guard", "strict"])
def test_a_round_that_was_revived_is_cancelled_with_what_came_after_it(
    order: Order, newer: str, way: str, cancelled: list[int]
) -> None:
    row = revived(order, newer)
    if way == "cancel":
        assert dq.cancel_timeout(order, "remind", reason="paid") is True
    else:
        with dq.before_deadline(order, "remind", reason="paid", strict=way == "strict") as timeout:
            assert timeout is not None and timeout.state == "cancelled"
    assert states() == ["cancelled", "skipped" if newer == "skipped" else "cancelled"]
    row.refresh_from_db()
    assert (row.cause, row.reason) == ("hand", "paid")
    assert row.pk in cancelled


@pytest.mark.parametrize("newer", ["cancelled", "skipped", "dead"])
def test_a_revived_round_that_is_firing_makes_a_cancel_too_late(order: Order, newer: str) -> None:
    row = revived(order, newer)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    assert dq.cancel_timeout(order, "remind") is False
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, "remind"):
        pytest.fail("ran")
    row.refresh_from_db()
    assert row.final_attempt


def test_a_firing_whose_next_round_was_cancelled_may_be_cancelled_again(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    dq.schedule_timeout(order, "remind", hours=1)
    assert [dq.cancel_timeout(order, "remind") for _ in range(2)] == [True, True]


def test_a_strict_guard_refuses_a_revived_round_whose_deadline_has_passed(order: Order) -> None:
    row = revived(order)
    Timeout.objects.filter(pk=row.pk).update(due_at=timezone.now() - HOUR)
    with pytest.raises(dq.DeadlinePassed) as refused, dq.before_deadline(order, "remind", strict=True):
        pytest.fail("ran")
    assert refused.value.timeout == row
    assert states() == ["pending", "cancelled"]


def test_a_round_that_was_revived_is_what_is_displayed(order: Order) -> None:
    row = revived(order)
    assert dq.get_deadline(order, "remind") == row.due_at
    assert countdown_of(order, "remind").timeout_id == row.pk
    prefetched = Order.objects.prefetch_related("timeouts").get()
    assert countdown_of(prefetched, "remind").timeout_id == row.pk
    assert "Nothing is pending" not in str(dq.explain_timeout(order, "remind"))
