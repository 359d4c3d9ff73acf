"""The clock of the database was an hour ahead, and is corrected: what it has left does not stop the regular sync."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming import scan, sync
from django_delayq.arming.sync import TableSync, automatic_policies
from django_delayq.models import PolicySync, Timeout
from tests.integration.arming.conftest import SINCE
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
def policy(declare: Any) -> dq.TimeoutPolicy[Any]:
    options: dict[str, Any] = {"since": SINCE["function"], "after": HOUR, "when": Q(status="slow")}
    return declare(Order, name="slow", **options)  # type: ignore[no-any-return]


def pending(policy: dq.TimeoutPolicy[Any]) -> int:
    return Timeout.objects.pending().filter(policy=policy.label).count()


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("is_same_worker", [True, False])
def test_the_next_sync_does_not_wait_until_the_clock_shows_the_same_time_again(
    policy: dq.TimeoutPolicy[Any], is_complete: bool, is_same_worker: bool
) -> None:
    """Rounds that became due within this hour were too old afterwards, and were never armed."""
    tables = TableSync("default")
    tables.run(at_once=True)
    ahead = timezone.now() + HOUR
    times = {"before_at": ahead - MINUTE, "began_at": ahead, "claimed_until": ahead + MINUTE / 2}
    PolicySync.objects.update(**times, finished_at=ahead + MINUTE / 60 if is_complete else None)
    due = timezone.now() - HOUR - timedelta(seconds=5)
    Order.objects.bulk_create([Order(status="slow", created_at=at) for at in (timezone.now(), due)])
    next_worker = tables if is_same_worker else TableSync("default")
    # A slice may end before this policy's turn, on a slow machine.
    wait_until(lambda: next_worker.run() and pending(policy) == 2, "its rounds are armed", seconds=20)
    automatic = [each.label for each in automatic_policies("default")]
    claims = PolicySync.objects.filter(policy__in=automatic).values_list("claimed_until", flat=True)
    assert all(claim is None or claim <= timezone.now() + MINUTE for claim in claims)


def test_a_long_pass_that_begins_after_it_is_completed(
    policy: dq.TimeoutPolicy[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the last pass was later than the begin of this one, so that each slice began it again."""
    monkeypatch.setattr(scan, "CHUNK", 2)
    monkeypatch.setattr(sync, "SLICE_SECONDS", 1e-9)
    tables = TableSync("default")
    tables.run(at_once=True)
    ahead = timezone.now() + HOUR
    PolicySync.objects.update(before_at=ahead, began_at=ahead, finished_at=ahead, claimed_until=ahead)
    Order.objects.bulk_create([Order(status="slow", created_at=timezone.now()) for _ in range(7)])
    for _ in range(20):
        tables.run()
    assert pending(policy) == 7
    assert PolicySync.objects.get(policy=policy.label).finished_at is not None
