"""The sync does not wait for objects that other transactions have locked; a backfill does."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import F, Q
from django.utils import timezone

from django_delayq import TimeoutPolicy
from django_delayq.arming.sync import Synced, TableSync, sync_policy
from django_delayq.models import PolicySync, Timeout
from tests.integration.firing.conftest import in_another_thread
from tests.support.waiting import wait_until
from tests.testapp.models import ExpressOrder, Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks no rows"),
]


@pytest.fixture(params=[Order, ExpressOrder])
def policy(request: pytest.FixtureRequest, declare: Any) -> TimeoutPolicy[Any]:
    hour = timedelta(hours=1)
    found: TimeoutPolicy[Any] = declare(
        request.param, name="slow", since="created_at", after=hour, when=Q(status="slow")
    )
    return found


def slow_orders(policy: TimeoutPolicy[Any]) -> tuple[Any, Any]:
    """Return two orders without timeouts."""
    first, second = (policy.model.objects.create(status="new", created_at=timezone.now()) for _ in range(2))
    policy.model.objects.update(status="slow")
    return first, second


def pending(policy: TimeoutPolicy[Any]) -> list[str]:
    return list(
        Timeout.objects.pending().filter(policy=policy.label).order_by("id").values_list("object_id", flat=True)
    )


def test_an_object_that_is_locked_is_left_to_the_next_sync(policy: TimeoutPolicy[Any]) -> None:
    """Sync and pruning of all workers waited for it, however long that transaction was forgotten."""
    locked, free = slow_orders(policy)
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=locked.pk)
        in_another_thread(lambda: TableSync("default").run(at_once=True))
        assert pending(policy) == [str(free.pk)]
    PolicySync.objects.all().delete()
    TableSync("default").run(at_once=True)
    assert pending(policy) == [str(free.pk), str(locked.pk)]


def test_an_object_that_stays_locked_is_armed_afterwards_although_its_deadline_has_passed(
    policy: TimeoutPolicy[Any],
) -> None:
    locked, free = slow_orders(policy)
    sync = TableSync("default")

    def minutes_later(minutes: int) -> None:
        by = timedelta(minutes=minutes)
        times = {name: F(name) - by for name in ("before_at", "began_at", "finished_at")}
        PolicySync.objects.filter(policy=policy.label).update(**times, claimed_until=None)

    Order.objects.filter(pk=locked.pk).update(created_at=timezone.now() - timedelta(minutes=66))
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=locked.pk)
        in_another_thread(lambda: sync.run(at_once=True))
        in_another_thread(lambda: minutes_later(8))
        in_another_thread(lambda: sync.run(at_once=True))
    minutes_later(2)
    sync.run(at_once=True)
    assert pending(policy) == [str(free.pk), str(locked.pk)]


def test_a_backfill_waits_for_an_object_that_is_locked(policy: TimeoutPolicy[Any]) -> None:
    locked, _ = slow_orders(policy)
    done: list[Synced] = []

    def backfill() -> None:
        done.append(sync_policy(policy, "default", backfill=True))
        connections.close_all()

    thread = threading.Thread(target=backfill)
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=locked.pk)
        thread.start()
        thread.join(0.3)
        assert not done
    wait_until(lambda: done, "the backfill has ended")
    thread.join()
    assert done == [Synced(armed=2)]
