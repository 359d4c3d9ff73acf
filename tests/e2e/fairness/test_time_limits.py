"""Handlers that never end are abandoned: other policies are on time, and no lock remains."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_delayq import schedule_timeout
from django_delayq.models import Timeout, WorkerSeen
from tests.settings import DB
from tests.support.processes import StartWorker, end
from tests.support.waiting import wait_until
from tests.testapp.models import Order, Parcel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.django_db(transaction=True)]

# With SQLite a handler inside a transaction holds the whole database.
MODES = ["hang_outside"] if DB == "sqlite" else ["hang", "hang_outside", "hang_many", "ahang"]
LIMIT_SECONDS = 2.0
MOST_LATE = timedelta(seconds=3 * LIMIT_SECONDS)
"""All that hang, one after the other on these threads, would delay others by at least four times the limit."""
QUICK = 200


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=500) as server:
        host, port = server.getsockname()
        yield f"{host}:{port}"


def test_handlers_that_hang_in_each_mode_delay_others_by_their_limit_at_most(
    start_worker: StartWorker, source: dict[str, str], declare: Any, silent: str
) -> None:
    for policy in [declare(Order, name=name) for name in MODES] * 2:
        schedule_timeout(Order.objects.create(), policy, seconds=0)
    parcels = [Parcel.objects.create() for _ in range(QUICK)]
    seconds = {"LEASE": 9.0, "SWEEP_INTERVAL": 1.0}
    variables = {"POLICIES": " ".join(MODES), "SILENT": silent, "LIMIT": str(LIMIT_SECONDS), **source}
    worker = start_worker("--concurrency", "4", seconds=seconds, **variables)
    wait_until(WorkerSeen.objects.exists, "the worker runs")
    for number, parcel in enumerate(parcels):
        schedule_timeout(parcel, "chase", seconds=8 * number / QUICK)
    hung = Timeout.objects.exclude(policy__endswith=".chase")
    quick = Timeout.objects.filter(policy__endswith=".chase")
    wait_until(lambda: quick.filter(state="fired").count() == QUICK, "the quick ones have fired")
    late = [settled_at - due_at for due_at, settled_at in quick.values_list("due_at", "settled_at") if settled_at]
    assert max(late) < MOST_LATE
    wait_until(lambda: hung.filter(state="dead").count() == 2 * len(MODES), "the hanging ones are dead")
    for row in hung:
        assert (row.attempts, {each["error"] for each in row.errors}) == (2, {"TimeLimitExceeded"})
    with transaction.atomic():
        nowait = connection.features.has_select_for_update_nowait
        assert len(Order.objects.select_for_update(nowait=nowait)) == 2 * len(MODES), "no lock remains"
    # Cancelled coroutines leave none; the batch leaves one more for each of the two times that it hung as a whole.
    stuck_in = {"hang": 4, "hang_outside": 4, "hang_many": 4, "ahang": 0}
    least = sum(stuck_in[name] for name in MODES)
    stuck = WorkerSeen.objects.filter(stuck_threads__range=(least, least + 2 * ("hang_many" in MODES)))
    wait_until(stuck.exists, "the worker counts its stuck threads")
    end(worker)
