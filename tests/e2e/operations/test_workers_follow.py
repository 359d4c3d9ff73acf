"""A real worker follows an operator in another process: it fires nothing that was stopped when it locked the row."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
from django.utils import timezone

from django_delayq.models import Timeout
from django_delayq.operations import change_delay, hold, pause
from tests.e2e.fairness.crowds import crowd, fired, latecomers
from tests.support.processes import StartWorker, is_stopped
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Parcel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.django_db(transaction=True)]

BY = "admin:alice"
SELDOM = {"LEASE": 300.0, "SWEEP_INTERVAL": 3600.0}


def count(name: str, state: str) -> int:
    return Timeout.objects.filter(policy=f"testapp.order.{name}", state=state).count()


def test_what_a_worker_has_in_hand_does_not_fire_when_it_is_stopped_or_moved(
    start_worker: StartWorker, source: dict[str, str]
) -> None:
    """The worker is suspended between its last check of stopped policies and its firings, as under a heavy load.

    It runs with `--burst`, without background threads, so that none is suspended while it holds a lock.
    """
    names = ("remind", "remind_many", "send_outside")
    for name in names:
        crowd(name, 20)
    crowd("linger", 5)
    moved = latecomers(20)
    Parcel.objects.update(sent_at=timezone.now() - timedelta(hours=1))
    worker = start_worker("--burst", STOP_AT="planned", seconds=SELDOM, **source)
    wait_until(lambda: is_stopped(worker.pid), "it is suspended")
    for name in names:
        (hold if name == "remind" else pause)(f"testapp.order.{name}", by=BY)
    change_delay("testapp.parcel.chase", timedelta(days=30), by=BY, mode="recompute")
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.wait(60) == 0
    assert count("linger", "fired") == 5, "these were not stopped"
    assert {name: count(name, "pending") for name in names} == dict.fromkeys(names, 20)
    assert fired(moved) == 0
    assert not Effect.objects.filter(what__in=names).exists()
    assert set(Timeout.objects.filter(state="pending").values_list("attempts", flat=True)) == {0}
