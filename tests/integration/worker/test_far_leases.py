"""Leases that end far in the future, given by a clock that was ahead or forged: honored for twice `LEASE` at most."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
from django.utils import timezone
from pytest_django import Settings

from django_delayq.engine.engine import DUE_UNIT
from django_delayq.models import Timeout
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, queue_in_redis

pytestmark = pytest.mark.django_db(transaction=True)
FAR = timedelta(hours=20)
LEASED = 2**52


@pytest.fixture(autouse=True)
def short_lease(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(seconds=5), "SWEEP_INTERVAL": timedelta(minutes=10)}


def test_in_redis(start_worker: StartWorker, with_redis: redis.Redis) -> None:
    [row] = due_orders("remind")
    seconds, _ = with_redis.time()
    far_ms = (seconds + int(FAR.total_seconds())) * 1000
    with_redis.zadd(queue_in_redis().keys.line(row.policy), {str(row.pk): LEASED + far_ms * DUE_UNIT})
    start_worker()
    wait_until(all_are("fired"), "its lease ended")


@pytest.mark.usefixtures("without_redis")
def test_in_the_ledger(start_worker: StartWorker) -> None:
    due_orders("remind")
    Timeout.objects.update(claims=1, claimed_until=timezone.now() + FAR)
    start_worker()
    wait_until(all_are("fired"), "its claim ended")


@pytest.mark.usefixtures("without_redis")
def test_of_a_row_that_is_firing(start_worker: StartWorker) -> None:
    due_orders("send_outside")
    Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=timezone.now() + FAR)
    worker = start_worker().worker
    wait_until(lambda: hasattr(worker, "_background"), "it has begun")
    worker._background.follow()
    wait_until(all_are("fired"), "its process counts as dead, and it is fired again")
    assert Timeout.objects.get().attempts == 1


@pytest.mark.usefixtures("without_redis")
def test_a_claim_of_a_worker_with_another_lease_is_honored(settings: Settings) -> None:
    from django_delayq.ledger.claiming import claim_each

    due_orders("remind")
    Timeout.objects.update(claims=1, claimed_until=timezone.now() + timedelta(seconds=100))
    assert not claim_each("default", None, {"testapp.order.remind": 10}, timedelta(seconds=5)).claims
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(hours=1)}
    Timeout.objects.update(claimed_until=timezone.now() + timedelta(hours=1))
    assert not claim_each("default", None, {"testapp.order.remind": 10}, timedelta(seconds=5)).claims
