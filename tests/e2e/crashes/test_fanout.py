"""A value that very many deadlines depend on is changed: workers move all, once each, although some die."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
from django.db.models import Q
from django.utils import timezone

from django_delayq.arming.watched import MOST
from django_delayq.models import PolicySync, Timeout
from tests.support.purchases import Declare
from tests.support.waiting import wait_until
from tests.testapp.market import Channel, Purchase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.django_db(transaction=True)]
logger = logging.getLogger(__name__)
COUNT = int(os.environ.get("DELAYQ_TEST_FANOUT", str(3 * MOST)))
SECONDS = {"SWEEP_INTERVAL": 0.5, "SYNC_INTERVAL": 4.0}


@pytest.fixture
def child_environment(child_environment: dict[str, str]) -> dict[str, str]:
    """Workers declare the policy, too."""
    return {**child_environment, "DELAYQ_TEST_POLICIES": "by_terms", "DELAYQ_TEST_SECONDS": json.dumps(SECONDS)}


def test_all_deadlines_of_a_channel_are_moved_once_although_two_workers_die(
    declare: Declare, start_command: Callable[..., subprocess.Popen[bytes]]
) -> None:
    policy = declare(
        Purchase, name="by_terms", after="channel__pay_within", since="created_at", when=Q(status="unpaid")
    )
    channel, now = Channel.objects.create(pay_within=timedelta(hours=5)), timezone.now()
    for begin in range(0, COUNT, 5000):
        size = min(5000, COUNT - begin)
        Purchase.objects.bulk_create([Purchase(channel=channel, created_at=now) for _ in range(size)])
    passes = PolicySync.objects.filter(policy=policy.label, finished_at__isnull=False)
    worker = start_command("delayq_worker", "--processes", "1")
    wait_until(passes.exists, "a first pass of the sync has ended", seconds=120)
    began = time.monotonic()
    channel.pay_within = timedelta(hours=7)
    channel.save()
    answered = time.monotonic() - began
    moved = Timeout.objects.filter(due_at=now + timedelta(hours=7))

    def is_moved(count: int) -> bool:
        return moved.count() >= count

    wait_until(PolicySync.objects.filter(checked__gte=1, checked__lt=COUNT).exists, "the progress is seen")
    for part in (0.2, 0.5):
        wait_until(partial(is_moved, int(part * COUNT)), "a part of them is moved", seconds=300)
        worker.kill()
        worker.wait()
        assert moved.count() < COUNT
        worker = start_command("delayq_worker", "--processes", "1")
    wait_until(lambda: moved.count() == COUNT, "all of them are moved", seconds=600)
    logger.info("%d: answered in %.0f ms, moved in %.1f s", COUNT, answered * 1000, time.monotonic() - began)
    histories = Timeout.objects.values_list("history", flat=True)
    assert {tuple(event["what"] for event in history) for history in histories} == {("recomputed",)}
