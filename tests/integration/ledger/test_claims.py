"""Claims and counters of workers: one at a time has a row, and only its own claims are extended and released."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connections
from django.utils import timezone

from django_delayq import operations, reschedule_timeout, schedule_timeout
from django_delayq.ledger import claiming
from django_delayq.ledger.claiming import meter
from django_delayq.models import PolicyMeter, Timeout
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

LEASE = timedelta(minutes=1)


@pytest.fixture
def row() -> Timeout:
    return schedule_timeout(Order.objects.create(status="new"), "remind", after=timedelta(0))


def claim() -> claiming.Claimed:
    return claiming.claim_each("default", None, {"testapp.order.remind": 10}, LEASE)


def lapse() -> None:
    """Let all claims expire, as after a minute in which their worker was suspended."""
    Timeout.objects.update(claimed_until=timezone.now() - timedelta(seconds=1))


def test_a_claimed_row_is_not_claimed_again_before_its_claim_expires(row: Timeout) -> None:
    assert claim().claims == {row.pk: 1}
    assert claim().claims == {}
    lapse()
    assert claim().claims == {row.pk: 2}, "a claim that was never released makes the row a suspect"


def test_what_is_due_before_the_next_poll_is_claimed_too(row: Timeout) -> None:
    soon = schedule_timeout(Order.objects.create(status="new"), "remind", seconds=30)
    claimed = claiming.claim_each("default", None, {row.policy: 10}, LEASE, timedelta(minutes=1))
    assert claimed.claims == {row.pk: 1, soon.pk: 1}


def test_an_extension_and_a_release_leave_the_claim_of_another_worker(row: Timeout) -> None:
    former = claim()
    lapse()
    present = claim()
    assert present.until != former.until
    _, kept = claiming.extend([row.pk], former.until, 20 * LEASE, "default")
    claiming.release({row.pk: timezone.now()}, former.until, "default")
    row.refresh_from_db()
    assert (kept, row.claims, row.claimed_until) == ([], 2, present.until)
    longer, kept = claiming.extend([row.pk], present.until, 20 * LEASE, "default")
    row.refresh_from_db()
    assert (kept, row.claimed_until) == ([row.pk], longer)


@pytest.mark.parametrize("seconds", [-60, 60], ids=["later", "at_once"])
def test_a_released_claim_does_not_count_as_a_delivery(row: Timeout, seconds: int) -> None:
    """Whether the row is free at once or, because it waits for something, only later."""
    claimed = claim()
    free_from = row.run_at - timedelta(seconds=seconds)
    assert claiming.release({row.pk: free_from}, claimed.until, "default") == []
    row.refresh_from_db()
    assert row.claims == 0
    assert row.claimed_until in {None, free_from}


def test_the_lines_of_stopped_policies_and_of_other_queues_are_not_asked(row: Timeout) -> None:
    def asked(queues: list[str] | None = None) -> list[str]:
        return list(claiming.labels_with_claimable("default", queues, [row.policy, "testapp.order.linger"]))

    assert (asked(["mail"]), asked(["mail", "default"])) == ([], [row.policy])
    assert asked() == ["testapp.order.remind"]
    operations.pause("testapp.order.remind", by="script:test")
    assert asked() == []
    operations.resume("testapp.order.remind", by="script:test")
    assert asked() == ["testapp.order.remind"]


def test_a_row_that_is_moved_loses_its_claim(row: Timeout) -> None:
    """Otherwise no other worker could claim it at its new deadline, if that comes before the end of the claim."""
    claim()
    assert reschedule_timeout(row, after=timedelta(0)) is not None
    row.refresh_from_db()
    assert (row.claims, row.claimed_until) == (0, None)


LABEL = "testapp.order.remind"


def count_up(times: int) -> None:
    try:
        for _ in range(times):
            with meter(LABEL, "brake", "default") as state:
                state["count"] = state.get("count", 0) + 1
    finally:
        connections.close_all()


def test_no_change_is_lost_when_several_threads_count() -> None:
    """They also create the row at the same time."""
    threads = [threading.Thread(target=count_up, args=(10,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert PolicyMeter.objects.get().state == {"count": 40}
