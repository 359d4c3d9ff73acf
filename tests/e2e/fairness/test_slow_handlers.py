"""Slow handlers never hold the last free thread: another policy's timeouts, one after the other, are on time."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import cycle
from typing import Any

import pytest

from django_delayq import schedule_timeout
from django_delayq.models import Timeout
from tests.settings import DB
from tests.support.processes import StartWorker, end
from tests.support.waiting import wait_until
from tests.testapp.models import Order, Parcel

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DB != "postgresql", reason="which thread is free does not depend on the database"),
]

SECONDS_SLOW = 4.0
ON_TIME = timedelta(seconds=3)
"""The maximum lateness of a fast timeout: less than it would have to wait for a slow handler."""


def lateness() -> list[timedelta | None]:
    """How late each quick timeout was; None: it has not fired yet."""
    rows = Timeout.objects.filter(policy__endswith=".chase").values_list("due_at", "settled_at")
    return [None if settled_at is None else settled_at - due_at for due_at, settled_at in rows]


def test_slow_handlers_do_not_make_quick_ones_late(
    start_worker: StartWorker, source: dict[str, str], declare: Any
) -> None:
    slow = [declare(Order, name=name, atomic=False) for name in ("dawdle", "adawdle")]
    for policy, _ in zip(cycle(slow), range(8), strict=False):
        schedule_timeout(Order.objects.create(), policy, seconds=0)
    seconds = {"LEASE": 9.0, "SWEEP_INTERVAL": 1.0}
    worker = start_worker(POLICIES="dawdle adawdle", DAWDLE=str(SECONDS_SLOW), seconds=seconds, **source)
    wait_until(Timeout.objects.filter(state="firing").exists, "slow handlers run")
    over_at = time.monotonic() + 2 * SECONDS_SLOW
    while time.monotonic() < over_at:
        schedule_timeout(Parcel.objects.create(), "chase", seconds=0.5)
        time.sleep(0.5)
    wait_until(lambda: None not in lateness(), "the quick ones have fired")
    assert max(filter(None, lateness())) < ON_TIME
    assert Timeout.objects.exclude(policy__endswith=".chase").exclude(state="fired").exists(), "there was no backlog"
    end(worker)
