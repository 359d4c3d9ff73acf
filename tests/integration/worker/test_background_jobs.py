"""Every worker syncs, prunes, sweeps, settles what died, extends its leases and follows operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from pytest_django import Settings

from django_delayq import schedule_timeout
from django_delayq.models import Timeout, WorkerSeen
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, queue_in_redis, states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

OFTEN = timedelta(milliseconds=100)


@pytest.fixture(autouse=True)
def often(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": OFTEN, "SYNC_INTERVAL": OFTEN}


def entries() -> dict[int, int]:
    """Return what Redis has, by id: when it is due, or when its lease expires."""
    return dict(queue_in_redis().peek())


@pytest.mark.usefixtures("source")
def test_a_worker_arms_what_saves_did_not_see(start_worker: StartWorker) -> None:
    start_worker()
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
    wait_until(lambda: states() == {"pending": 1})


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(("days", "left"), [(2, 1), (4, 0)])
def test_a_worker_deletes_what_was_settled_before_the_retention(
    start_worker: StartWorker, settings: Settings, days: int, left: int
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETENTION": timedelta(days=3), "CATCH_UP": timedelta(days=1)}
    [row], [oldest] = due_orders("remind"), due_orders("remind")
    for each, ago in ((row, days), (oldest, 30)):
        then = timezone.now() - timedelta(days=ago)
        Timeout.objects.filter(pk=each.pk).update(
            state="fired", cause="due", slot_taken=None, settled_at=then, due_at=then, first_due_at=then
        )
    start_worker()
    wait_until(lambda: not Timeout.objects.filter(pk=oldest.pk).exists())
    assert Timeout.objects.filter(pk=row.pk).count() == left


@pytest.mark.usefixtures("source")
def test_a_worker_settles_what_another_one_died_with(start_worker: StartWorker) -> None:
    [row] = due_orders("send_outside", hours=1)
    Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=timezone.now() - timedelta(minutes=1))
    start_worker()
    wait_until(all_are("fired"))
    row.refresh_from_db()
    assert row.attempts == 1, "a death does not count as an attempt"


def test_a_row_that_cannot_be_settled_does_not_stop_the_sweep(start_worker: StartWorker, with_redis: Any) -> None:
    """Otherwise nothing beyond the horizon would fire, in any worker, until the row is repaired."""
    [broken] = due_orders("send_outside", hours=1)
    due_orders("remind", 3, hours=2)
    expired = {"state": "firing", "slot_taken": None, "run_at": timezone.now() - timedelta(minutes=1)}
    Timeout.objects.filter(pk=broken.pk).update(**expired, history=0)
    start_worker()
    Timeout.objects.exclude(pk=broken.pk).update(run_at=timezone.now())
    wait_until(lambda: states() == {"firing": 1, "fired": 3})


def test_a_burst_syncs_first(start_worker: StartWorker, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None, "SYNC_INTERVAL": timedelta(minutes=10)}
    begun = timezone.now() - timedelta(minutes=31)
    Order.objects.bulk_create([Order(status="unpaid", created_at=begun)])
    worker = start_worker(burst=True)
    worker.join()
    assert states() == {"fired": 1}


class Handler:
    """A handler that runs until the test ends it."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self, order: Order, timeout: Timeout) -> None:
        self.begun.set()
        assert self.end.wait(30)


@pytest.fixture
def handler() -> Iterator[Handler]:
    made = Handler()
    yield made
    made.end.set()


def test_a_lease_lasts_as_long_as_the_setting_and_is_extended(
    start_worker: StartWorker, with_redis: Any, settings: Settings, declare: Any, handler: Handler
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(seconds=9)}
    policy = declare(Order, handler, name="endless")
    start_worker()
    # On SQLite the first heartbeat, which the same thread writes, would wait for the transaction of the handler.
    wait_until(WorkerSeen.objects.exists)
    [row] = due_orders(policy)
    assert handler.begun.wait(30)
    first = entries()[row.pk]
    left = first / 1000 - timezone.now().timestamp()
    assert left < 9.5
    wait_until(lambda: entries()[row.pk] > first or timezone.now().timestamp() * 1000 > first)
    assert timezone.now().timestamp() * 1000 < first, "it expired; the worker has leased it a second time"
    handler.end.set()
    wait_until(all_are("fired"))


def test_a_claim_lasts_as_long_as_the_setting(
    start_worker: StartWorker, settings: Settings, declare: Any, handler: Handler
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None, "LEASE": timedelta(seconds=3)}
    [row] = due_orders(declare(Order, handler, name="endless", atomic=False))
    start_worker()
    assert handler.begun.wait(30)
    row.refresh_from_db()
    assert row.claimed_until is not None
    assert row.claimed_until - timezone.now() < timedelta(seconds=3.5)


def test_an_idle_worker_is_woken_by_what_is_scheduled(
    start_worker: StartWorker, with_redis: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the message it would check again after ten minutes, as the sweep would."""
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": timedelta(minutes=10)}
    monkeypatch.setattr("django_delayq.worker.sources.redis.POLL_SECONDS", 600.0)
    monkeypatch.setattr("django_delayq.worker.loop.POLL_SECONDS", 600.0)
    start_worker()
    due_orders("remind")
    wait_until(all_are("fired"))
    schedule_timeout(Order.objects.create(status="new"), "remind", after=timedelta(0))
    wait_until(all_are("fired"))
