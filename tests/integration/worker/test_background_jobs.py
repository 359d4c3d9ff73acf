"""Every worker syncs, prunes, sweeps, settles what died, extends its leases and follows operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq.ledger.claiming import claim_each
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.operations import advance_clock
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, queue_in_redis, states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

OFTEN, MINUTE, DAY = timedelta(milliseconds=100), timedelta(minutes=1), timedelta(days=1)


@pytest.fixture(autouse=True)
def often(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": OFTEN, "SYNC_INTERVAL": OFTEN}


@pytest.mark.usefixtures("source")
def test_a_worker_arms_what_saves_did_not_see_deletes_what_is_old_and_settles_what_another_one_died_with(
    start_worker: StartWorker, settings: Settings
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETENTION": 3 * DAY, "CATCH_UP": DAY}
    young, old = due_orders("remind", 2)
    for row, days in ((young, 2), (old, 4)):
        then = timezone.now() - days * DAY
        Timeout.objects.filter(pk=row.pk).update(
            state="fired", cause="due", slot_taken=None, settled_at=then, due_at=then, first_due_at=then
        )
    [died] = due_orders("send_outside", hours=1)
    expired: dict[str, Any] = {"state": "firing", "slot_taken": None, "run_at": timezone.now() - MINUTE}
    Timeout.objects.filter(pk=died.pk).update(attempts=1, **expired)
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
    start_worker()
    settled = {(young.policy, "fired"), (died.policy, "fired"), ("testapp.order.cancel_unpaid", "pending")}
    wait_until(lambda: set(Timeout.objects.values_list("policy", "state")) == settled)
    wait_until(lambda: not Timeout.objects.filter(pk=old.pk).exists())
    died.refresh_from_db()
    assert died.attempts == 1, "a death does not count as an attempt"
    assert Timeout.objects.filter(pk=young.pk).exists()


def test_a_row_that_cannot_be_settled_does_not_stop_the_sweep(start_worker: StartWorker, with_redis: Any) -> None:
    """Otherwise nothing beyond the horizon would fire, in any worker, until the row is repaired."""
    [broken] = due_orders("send_outside", hours=1)
    due_orders("remind", 3, hours=2)
    expired: dict[str, Any] = {"state": "firing", "slot_taken": None, "run_at": timezone.now() - MINUTE}
    Timeout.objects.filter(pk=broken.pk).update(**expired, history=0)
    start_worker()
    Timeout.objects.exclude(pk=broken.pk).update(run_at=timezone.now())
    wait_until(lambda: states() == {"firing": 1, "fired": 3})


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
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(seconds=6)}
    policy = declare(Order, handler, name="endless")
    start_worker()
    # On SQLite the first heartbeat, which the same thread writes, would wait for the transaction of the handler.
    wait_until(WorkerSeen.objects.exists)
    [row] = due_orders(policy)
    assert handler.begun.wait(30)

    def ends_at() -> int:
        return dict(queue_in_redis().peek())[row.pk]

    first = ends_at()
    assert first / 1000 - timezone.now().timestamp() < 6.5
    wait_until(lambda: ends_at() > first or timezone.now().timestamp() * 1000 > first)
    assert timezone.now().timestamp() * 1000 < first, "it expired; the worker has leased it a second time"
    handler.end.set()
    wait_until(all_are("fired"))


@pytest.mark.usefixtures("source")
def test_workers_fire_each_step_before_the_next(start_worker: StartWorker, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging", "PRODUCTION": "production"}
    start_worker()
    order = Order.objects.create()
    for number, name in enumerate(("remind", "linger")):
        dq.schedule_timeout(order, name, days=number + 1)
    done = advance_clock(timedelta(days=3), actor="script:test")
    assert done.is_complete
    rows = {row.policy.rpartition(".")[2]: row for row in Timeout.objects.all()}
    assert {row.state for row in rows.values()} == {"fired"}
    first, second = rows["remind"].settled_at, rows["linger"].settled_at
    assert first is not None and second is not None and first < second


@pytest.mark.usefixtures("without_redis")
def test_a_claim_of_a_worker_with_another_lease_is_honored(settings: Settings) -> None:
    due_orders("remind")
    for lease, claimed_for in [(timedelta(seconds=5), timedelta(seconds=100)), (timedelta(hours=1),) * 2]:
        settings.DELAYQ = {**settings.DELAYQ, "LEASE": lease}
        Timeout.objects.update(claims=1, claimed_until=timezone.now() + claimed_for)
        assert not claim_each("default", None, {"testapp.order.remind": 10}, timedelta(seconds=5)).claims
