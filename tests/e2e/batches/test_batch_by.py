"""`batch_by` with real workers: one call for each owner, however the workers share the rows."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import pytest

from django_delayq import clock, schedule_timeouts
from django_delayq.models import Timeout, WorkerSeen
from tests.support.processes import StartWorker, settled, states
from tests.support.waiting import wait_until
from tests.testapp.market import Channel, Purchase
from tests.testapp.models import Effect
from tests.testapp.timeouts import digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.django_db(transaction=True)]
OWNERS, EACH, WORKERS = 30, 20, 3


def due_at(moment: datetime, declare: Any, *, beside: bool = False) -> None:
    """Schedule twenty timeouts of each of thirty owners, in any order; or also as many of another policy."""
    policy = declare(Purchase, digest, name="digest", batch=500, batch_by="channel")
    channels = Channel.objects.bulk_create(Channel() for _ in range(OWNERS))
    owners = [channel for channel in channels for _ in range(EACH)]
    random.Random(5).shuffle(owners)
    purchases = Purchase.objects.bulk_create(Purchase(channel=owner) for owner in owners)
    schedule_timeouts(purchases, policy, at=moment)
    if beside:
        schedule_timeouts(purchases, declare(Purchase, name="beside"), at=moment)


def start(start_worker: StartWorker, source: dict[str, str]) -> None:
    seconds = {"LEASE": 30.0, "SWEEP_INTERVAL": 1.0}
    for _ in range(WORKERS):
        start_worker("--concurrency", "4", POLICIES="digest", seconds=seconds, **source)
    wait_until(lambda: WorkerSeen.objects.count() == WORKERS, "the workers run")


def check(count: int = OWNERS * EACH) -> None:
    wait_until(settled(count), "all are settled", 120)
    assert states() == {"fired": count}
    calls = list(Effect.objects.filter(what="digest").values_list("object_id", "timeout_id"))
    owners = sorted(str(pk) for pk in Channel.objects.values_list("pk", flat=True))
    assert sorted(calls) == [(owner, EACH) for owner in owners], "one call for each owner, with all"
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}


def test_a_backlog_is_one_call_for_each_owner_too(
    start_worker: StartWorker, source: dict[str, str], declare: Any
) -> None:
    due_at(clock.now() - timedelta(minutes=10), declare)
    start(start_worker, source)
    check()


def test_owners_whose_timeouts_are_due_together_get_one_call_each_beside_a_policy_that_locks_the_same_objects(
    start_worker: StartWorker, source: dict[str, str], declare: Any
) -> None:
    start(start_worker, source)
    due_at(clock.now() + timedelta(seconds=4), declare, beside=True)
    check(2 * OWNERS * EACH)
