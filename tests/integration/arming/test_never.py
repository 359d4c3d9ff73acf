"""A `since` that means "never", such as 31 December 9999: nothing is armed, and nothing raises."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone as django_timezone

import django_delayq as dq
from django_delayq.arming.scan import candidates
from django_delayq.arming.sync import Synced, sync_policy
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)
BEGIN, END = datetime.min, datetime.max  # noqa: DTZ901 - in several zones
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
AWAY = [NEVER, datetime(9999, 12, 31, tzinfo=UTC), datetime(2108, 12, 31, 23, 30, tzinfo=UTC)]
OTHER_AFTER = {"constant": HOUR, "function": lambda order: HOUR}
"""Of both kinds, so that the database and Python decide."""


@pytest.fixture(params=["column", "function"])
def since(request: pytest.FixtureRequest) -> Any:
    return "paid_at" if request.param == "column" else lambda order: order.paid_at


@pytest.fixture(params=OTHER_AFTER)
def policy(request: pytest.FixtureRequest, declare: Declare, since: Any) -> dq.TimeoutPolicy[Any]:
    return declare(Order, name="never", after=OTHER_AFTER[request.param], since=since, when=Q(status="unpaid"))


def states() -> list[tuple[str, str]]:
    return list(Timeout.objects.order_by("id").values_list("state", "cause"))


@pytest.mark.parametrize("paid_at", AWAY)
def test_saving_and_syncing_arm_nothing_cancel_what_was_pending_and_raise_nothing(
    policy: dq.TimeoutPolicy[Any], paid_at: datetime
) -> None:
    now = django_timezone.now()
    order = Order.objects.create(paid_at=paid_at)
    with transaction.atomic():
        order.save(update_fields=["paid_at"])
    assert states() == []
    for order.paid_at in (now, paid_at):
        order.save()
    assert states() == [("cancelled", "condition")]
    order.paid_at = now
    order.save()
    assert dq.get_deadline(order, policy) == now + HOUR, "a datetime arms it again"
    Timeout.objects.all().delete()
    Order.objects.bulk_create([Order(paid_at=at) for at in (paid_at, now, paid_at)])
    assert sync_policy(policy, "default") == Synced(armed=2)
    Timeout.objects.all().delete()
    assert dq.sync_timeouts(Order.objects.all()) == 2
    Order.objects.update(paid_at=paid_at)
    assert sync_policy(policy, "default") == Synced(cancelled=2)


def test_the_database_leaves_such_rows_out_of_each_sync(declare: Declare) -> None:
    Order.objects.bulk_create([Order(paid_at=at) for at in AWAY])
    last = Order.objects.create(paid_at=datetime(2108, 12, 31, 22, 30, tzinfo=UTC))
    policy = declare(Order, name="never", after=HOUR, since="paid_at", when=Q(status="unpaid"))
    assert list(candidates(policy, "default", delay=HOUR)) == [last]
    assert sync_policy(policy, "default", backfill=True) == Synced(armed=1)


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL has such a datetime")
def test_infinity_counts_as_never_although_no_driver_can_read_it(declare: Declare) -> None:
    policy = declare(Order, name="never", after=HOUR, since="paid_at", when=Q(status="unpaid"))
    bad, good = (Order.objects.create(paid_at=django_timezone.now()) for _ in range(2))
    with connection.cursor() as cursor:
        cursor.execute("UPDATE testapp_order SET paid_at = 'infinity' WHERE id = %s", [bad.pk])
    assert dq.sync_timeouts(Order.objects.filter(pk=bad.pk).only("pk")) == 1
    Timeout.objects.filter(object_id=good.pk).delete()
    assert sync_policy(policy, "default") == Synced(armed=1)
    assert dq.get_deadline(good, policy)


@pytest.mark.parametrize("after", [timedelta.max, timedelta.min, timedelta(days=40_000), -timedelta(days=1_000_000)])
def test_a_function_after_whose_deadline_is_beyond_the_calendar_arms_nothing(
    declare: Declare, since: Any, after: timedelta
) -> None:
    declare(Order, name="never", after=lambda order: after, since=since, when=Q(status="unpaid"))
    Order.objects.create(paid_at=django_timezone.now())
    assert states() == []


def test_the_verbs_ask_for_a_delay_and_take_one(policy: dq.TimeoutPolicy[Any]) -> None:
    order = Order.objects.create(paid_at=NEVER)
    with transaction.atomic():
        for call in (lambda: dq.schedule_timeout(order, policy), lambda: dq.schedule_timeouts([order], policy)):
            with pytest.raises(dq.InvalidDelay, match="no deadline of its own"):
                call()
        if isinstance(policy.since, str):
            assert "not set, or too far in the future" in dq.explain_timeout(order, policy).outlook
        row = dq.schedule_timeout(order, policy, seconds=0)
        row.refresh_from_db()
        assert row.since_at is None, "pages could not show 31 December 9999 in a zone east of Greenwich"
        order.save()
        order.save(update_fields=["paid_at"])
        assert sync_policy(policy, "default") == Synced()
    assert fire_due(policy) == 1
    order.save()
    dq.schedule_timeouts([order], policy, hours=1)
    assert states() == [("fired", "due"), ("pending", "")]
    with dq.before_deadline(order, policy):
        pass
    assert dq.cancel_timeout(order, policy) is True
