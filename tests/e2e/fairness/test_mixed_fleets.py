"""Workers of two releases side by side: each fires what it knows, and what only one of them knows is hardly late."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from django_delayq import schedule_timeout
from django_delayq.models import Timeout, WorkerSeen
from tests.settings import DB
from tests.support.processes import StartWorker
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DB != "postgresql", reason="which policies a worker knows does not depend on the database"),
]

SHORT = {"LEASE": 9.0, "SWEEP_INTERVAL": 2.0}
ON_TIME = timedelta(seconds=6)


def lateness(rows: list[Timeout]) -> list[timedelta]:
    settled = Timeout.objects.filter(pk__in=[row.pk for row in rows]).exclude(state="pending")
    return [row.settled_at - row.due_at for row in settled if row.state == "fired" and row.settled_at]


@pytest.mark.usefixtures("redis_client")
@pytest.mark.parametrize("alias", [" alias", ""], ids=["with an alias", "without an alias"])
def test_a_renamed_policy_fires_under_both_names(start_worker: StartWorker, declare: Any, alias: str) -> None:
    """A row under the old name is for the old worker, and for the new one if it has the alias; others for the new."""
    former, current = declare(Order, name="former"), declare(Order, name="current")
    for policies in ("former", f"current{alias}"):
        start_worker(POLICIES=policies, seconds=SHORT)
    wait_until(lambda: WorkerSeen.objects.count() == 2, "both workers run")
    rows = []
    for _ in range(6):
        rows.append(schedule_timeout(Order.objects.create(), former, seconds=0.2))
        rows.append(schedule_timeout(Order.objects.create(), current, seconds=0.2))
        time.sleep(0.2)
    wait_until(lambda: len(lateness(rows)) == len(rows), "all have fired")
    assert max(lateness(rows)) < ON_TIME
