"""The strict guard and the worker read the same deadline, also while the terms of very many objects move."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import clock
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.purchases import MINUTE, UNPAID, Declare, at, due, its_channel, noon  # noqa: F401 - fixtures
from tests.testapp.market import Channel, Purchase

pytestmark = pytest.mark.django_db(transaction=True)
MANY = 501
"""More than are moved in the transaction of the save: the sync moves the rest."""


def is_in_time(purchase: Purchase) -> bool:
    try:
        with dq.before_deadline(purchase, "terms", strict=True):
            purchase.status = "paid"
            purchase.save()
    except dq.DeadlinePassed:
        return False
    return True


DEADLINES: dict[str, dict[str, Any]] = {
    "after": {"after": "channel__pay_within"},
    "since": {"after": timedelta(0), "since": "channel__opens_at"},
    "both": {"after": lambda purchase: timedelta(0), "since": "channel__opens_at"},
}


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("after", 30, 90), ("after", 90, 30), ("since", 90, 30), ("both", 30, 90)]
)
def test_the_strict_guard_and_the_worker_agree_before_the_sync_has_passed(
    channel: Channel, declare: Declare, kind: str, before: int, after: int
) -> None:
    def set_to(minutes: int) -> None:
        channel.pay_within, channel.opens_at = minutes * MINUTE, at(minutes)
        channel.save()

    set_to(before)
    policy = declare(Purchase, name="terms", **{**UNPAID, **DEADLINES[kind]})
    Purchase.objects.bulk_create(Purchase(created_at=at(), channel=channel) for _ in range(MANY))
    first, *_, last = Purchase.objects.order_by("pk")
    set_to(after)
    assert due(last) == [before], "the sync has not passed"
    with clock.set_to(at(35)):
        assert is_in_time(last) is (after > 35), "the deadline is 30 minutes, and not 90, or the other way round"
        assert int(fire_due(policy, first)) == 0, "its row is due at minute 90, or its data is read again"
        dq.sync_timeouts(first)
        assert int(fire_due(policy, first)) == (after <= 35)
    with clock.set_to(at(91)):
        assert not is_in_time(Purchase.objects.order_by("pk")[1])
    assert Timeout.objects.filter(object_id=last.pk, state="pending").count() == (after <= 35)
