"""The strict guard and the worker read the same deadline, also while the terms of very many objects move."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import clock
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.data.conftest import MINUTE, UNPAID, Declare, at, due
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


def test_beside_an_outdated_deadline_one_with_a_key_fires(channel: Channel, declare: Declare) -> None:
    """In one transaction, with `together`: neither hides the other."""
    policy = declare(Purchase, name="terms", after="channel__pay_within", together=10, **UNPAID)
    purchase = Purchase.objects.create(created_at=at(), channel=channel)
    keyed = dq.schedule_timeout(purchase, policy, key="call", minutes=32)
    Channel._base_manager.update(pay_within=90 * MINUTE)
    with clock.set_to(at(35)):
        assert [row.pk for row in fire_due(policy, purchase).fired] == [keyed.pk]
    assert due(purchase) == [90]


@pytest.mark.parametrize(("terms", "in_time"), [(None, True), (90 * MINUTE, False)])
def test_a_deadline_set_by_hand_and_an_object_that_is_exempt_now_are_read_as_the_worker_does(
    channel: Channel, declare: Declare, terms: object, in_time: bool
) -> None:
    declare(Purchase, name="terms", after="channel__pay_within", **UNPAID)
    purchase = Purchase.objects.create(created_at=at(), channel=channel)
    if not in_time:
        dq.reschedule_timeout(purchase, "terms", minutes=20)
    Channel._base_manager.update(pay_within=terms)
    with clock.set_to(at(35)):
        assert is_in_time(purchase) is in_time
