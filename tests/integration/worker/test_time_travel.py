"""Real workers fire what becomes due in staging, step by step."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.operations import advance_clock
from tests.support.workers import StartWorker
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.usefixtures("source")
def test_workers_fire_each_step_before_the_next(start_worker: StartWorker, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging", "PRODUCTION": "production"}
    start_worker()
    order = Order.objects.create()
    for number, name in enumerate(("remind", "linger")):
        dq.schedule_timeout(order, name, days=number + 1)
    done = advance_clock(timedelta(days=3), actor="script:test")
    assert done.is_complete
    rows = {row.policy.rpartition(".")[2]: row for row in Timeout.objects.all()}
    assert {row.state for row in rows.values()} == {"fired"}
    first, second = rows["remind"].settled_at, rows["linger"].settled_at
    assert first is not None and second is not None and first < second
