"""Handlers that hang never hold the last free thread: another policy's timeouts, one after the other, fire."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from django_delayq import schedule_timeout
from django_delayq.models import Timeout
from tests.settings import DB
from tests.support.processes import StartWorker
from tests.support.waiting import wait_until
from tests.testapp.models import Order, Parcel

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DB != "postgresql", reason="which thread is free does not depend on the database"),
]

FOREVER = "600"


@pytest.mark.usefixtures("redis_client")
def test_slow_handlers_do_not_make_quick_ones_late(start_worker: StartWorker, declare: Any) -> None:
    slow = [declare(Order, name=name, atomic=False) for name in ("dawdle", "adawdle")]
    for policy, _ in zip(cycle(slow), range(8), strict=False):
        schedule_timeout(Order.objects.create(), policy, seconds=0)
    hanging = Timeout.objects.filter(policy__endswith="dawdle")
    start_worker(POLICIES="dawdle adawdle", DAWDLE=FOREVER, seconds={"LEASE": 9.0, "SWEEP_INTERVAL": 1.0})
    wait_until(hanging.filter(state="firing").exists, "handlers hang")
    for number in range(1, 11):
        schedule_timeout(Parcel.objects.create(), "chase", seconds=0)
        wait_until(lambda: Timeout.objects.filter(state="fired").count() == number, "the other one has fired")  # noqa: B023
    assert set(hanging.values_list("state", flat=True)) == {"firing", "pending"}, "there was no backlog"
