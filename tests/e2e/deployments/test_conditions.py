"""Real workers of releases whose conditions differ, side by side."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.utils import timezone

from django_delayq.models import PolicySync, Timeout, WorkerSeen
from tests.support.processes import StartWorker
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one writer; others are as PostgreSQL"),
]
MINUTE = timedelta(minutes=1)
SECONDS = {"LEASE": 5.0, "SWEEP_INTERVAL": 1.0, "SYNC_INTERVAL": 2.0}
FORMER, NEW = "billed", "billed,review"


@pytest.fixture
def release(start_worker: StartWorker) -> Callable[[str], subprocess.Popen[bytes]]:
    """Start a worker of the release with this condition, and wait until it runs and its declaration is known."""
    started = set[str]()

    def start(statuses: str) -> subprocess.Popen[bytes]:
        known = PolicySync.objects.filter(policy="testapp.order.reviewed").values_list("declarations", flat=True)
        before = list(known.all())
        worker = start_worker(seconds=SECONDS, POLICIES="reviewed", STATUSES=statuses)
        wait_until(WorkerSeen.objects.filter(pid=worker.pid).exists, "it has begun")
        if statuses not in started:  # a release that is started again changes nothing
            wait_until(lambda: list(known.all()) != before, "its declaration is the newest")
        started.add(statuses)
        return worker

    return start


def test_while_a_release_with_a_wider_condition_is_deployed_each_due_timeout_fires(
    release: Callable[[str], subprocess.Popen[bytes]], declare: Any
) -> None:
    """The test's process is a web process of the new release."""
    former = release(FORMER)
    release(NEW)
    former.kill()  # in the middle of the deployment its supervisor starts it again
    former.wait()
    release(FORMER)
    declare(Order, name="reviewed", after=30 * MINUTE, since="created_at", when=Q(status__in=NEW.split(",")))
    for number in range(30):
        created_at = timezone.now() - 30 * MINUTE + timedelta(seconds=number / 10)
        Order.objects.create(status="review" if number % 3 else FORMER, created_at=created_at)
    rows = Timeout.objects.filter(policy="testapp.order.reviewed")
    fired = rows.filter(state="fired").values("object_id").distinct()
    wait_until(lambda: fired.count() == 30, "all have fired", seconds=90)
    assert Effect.objects.filter(what__startswith="reviewed").count() == 30
    assert Effect.objects.filter(what=f"reviewed {NEW}").count() >= 20, "those that only the new condition covers"
