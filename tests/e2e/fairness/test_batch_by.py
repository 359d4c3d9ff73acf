"""`batch_by` with real workers: one call for each owner, however the workers share the rows."""

from __future__ import annotations

import random
from datetime import timedelta
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


def test_owners_whose_timeouts_are_due_together_get_one_call_each_beside_a_policy_that_locks_the_same_objects(
    start_worker: StartWorker, source: dict[str, str], declare: Any
) -> None:
    policy = declare(Purchase, digest, name="digest", batch=500, batch_by="channel")
    for _ in range(WORKERS):
        start_worker("--concurrency", "4", POLICIES="digest", seconds={"LEASE": 30.0, "SWEEP_INTERVAL": 1.0}, **source)
    wait_until(lambda: WorkerSeen.objects.count() == WORKERS, "the workers run")
    channels, at = Channel.objects.bulk_create(Channel() for _ in range(OWNERS)), clock.now() + timedelta(seconds=4)
    owners = [channel for channel in channels for _ in range(EACH)]
    random.Random(5).shuffle(owners)
    purchases = Purchase.objects.bulk_create(Purchase(channel=owner) for owner in owners)
    schedule_timeouts(purchases, policy, at=at)
    schedule_timeouts(purchases, declare(Purchase, name="beside"), at=at)
    wait_until(settled(2 * OWNERS * EACH), "all are settled", 120)
    assert states() == {"fired": 2 * OWNERS * EACH}
    calls = list(Effect.objects.filter(what="digest").values_list("object_id", "timeout_id"))
    assert sorted(calls) == sorted((str(channel.pk), EACH) for channel in channels), "one call for each, with all"
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}
