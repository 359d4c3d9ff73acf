"""A real worker follows an operator in another process: it fires nothing that was stopped when it locked the row.

No test reads the clock of this machine. The ledger stores when each row was locked for firing, and the database
when the change of the operator was committed. The caches and the speed of a worker must not matter.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq.models import Timeout
from django_delayq.operations import change_delay, hold, pause, resume
from django_delayq.sql.now import database_now
from tests.e2e.fairness.crowds import crowd, fired, latecomers
from tests.settings import DB
from tests.support.processes import StartWorker, end, is_stopped
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Parcel

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

BY = "admin:alice"
STOPS = () if DB == "sqlite" else (pause, hold)
"""Operations during a flood. On SQLite a flood holds the write lock, and an operator may be too late."""
CROWD = 2000 if STOPS else 50
HOUR = timedelta(hours=1)
SELDOM: Any = {"seconds": {"LEASE": 300.0, "SWEEP_INTERVAL": 3600.0}}
"""For a worker that is notified by the operation, or not within this test."""


def committed(steer: Callable[..., object], name: str) -> datetime:
    """Run an operation on the policy; return a time after its commit."""
    assert steer(f"testapp.order.{name}", by=BY) is not None
    return database_now("default")


def of(name: str, state: str = "fired") -> Any:
    return Timeout.objects.filter(policy=f"testapp.order.{name}", state=state)


def fired_after(name: str, moment: datetime) -> int:
    """Return how many were locked for firing later than `moment`, by the clock of the database."""
    found: int = of(name).filter(settled_at__gt=moment).count()
    return found


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
    Parcel.objects.update(sent_at=timezone.now() - HOUR)
    worker = start_worker("--burst", STOP_AT="planned", **SELDOM, **source)
    wait_until(lambda: is_stopped(worker.pid), "it is suspended")
    moments = {name: committed(hold if name == "remind" else pause, name) for name in names}
    change_delay("testapp.parcel.chase", timedelta(days=30), by=BY, mode="recompute")
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.wait(60) == 0
    assert of("linger").count() == 5, "these were not stopped"
    assert {name: fired_after(name, moments[name]) for name in names} == dict.fromkeys(names, 0)
    assert {name: of(name, "pending").count() for name in names} == dict.fromkeys(names, 20)
    assert fired(moved) == 0
    assert not Effect.objects.filter(what__in=names).exists()
    assert set(Timeout.objects.filter(state="pending").values_list("attempts", flat=True)) == {0}


def test_of_a_crowd_nothing_fires_after_its_policy_was_stopped(
    start_worker: StartWorker, source: dict[str, str]
) -> None:
    """A worker that starts during the stop fires none; it continues after the resume."""
    paused_at = committed(pause, "remind")
    crowd("remind", 300)
    crowd("linger", CROWD)
    worker = start_worker("--concurrency", "4", LINGER="0.02", **SELDOM, **source)
    for stop in STOPS:
        before = of("linger").count()
        wait_until(lambda before=before: of("linger").count() > before + 20, "the worker is at it")  # type: ignore[misc]
        moment, late = committed(stop, "linger"), latecomers(10)
        wait_until(lambda late=late: fired(late) == 10, "the worker has passed all that were due earlier")  # type: ignore[misc]
        assert fired_after("linger", moment) == 0
        assert of("linger", "pending").exists(), "the backlog was fired before it was stopped"
        committed(resume, "linger")
    committed(pause, "linger")
    assert fired_after("remind", paused_at) == of("remind").count() == 0
    committed(resume, "remind")
    wait_until(of("remind").exists, "the timeouts that were stopped before the worker started continue")
    parcel = Parcel.objects.create(status="open", sent_at=timezone.now())
    row = parcel.timeouts.get()
    assert row.due_at - timezone.now() > HOUR / 2
    change_delay("testapp.parcel.chase", timedelta(0), by=BY, mode="recompute")
    wait_until(lambda: fired([row.pk]) == 1, "the timeout that is due by the new delay has fired")
    end(worker)
