"""A rate of 20 a second with two workers: it is kept, in the order of the deadlines, and other policies are on time.

Handlers store when they began. The period is five seconds, so that a machine which runs other tests, and lets a thread
wait for a tenth of a second, does not lose many slots. On an idle machine `DELAYQ_TEST_PACED_SECONDS=1` and
`DELAYQ_TEST_DUE=1000` test 20 in each second; `pytest -s` shows how many began.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from datetime import datetime, timedelta
from typing import Any

import pytest

from django_delayq import Limits, clock
from django_delayq.models import Timeout
from tests.e2e.fairness.conftest import fired, latecomers
from tests.support.processes import StartWorker, due_now
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order
from tests.testapp.timeouts import PACED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.django_db(transaction=True)]

DUE = int(os.environ.get("DELAYQ_TEST_DUE", "240"))
SECOND = timedelta(seconds=1)


def overdue(count: int) -> list[int]:
    """Write timeouts of the policy with a rate that were due a second after each other; return their ids."""
    rows = due_now("paced", count)
    first = clock.now() - count * SECOND
    for place, row in enumerate(rows):
        row.run_at = row.due_at = first + place * SECOND
    Timeout.objects.bulk_update(rows, ["run_at", "due_at"])
    return [row.pk for row in rows]


def most_within(period: timedelta, moments: list[datetime]) -> int:
    return max(bisect_left(moments, begin + period) - place for place, begin in enumerate(moments))


def test_two_workers_together_keep_the_rate_and_the_order(
    start_worker: StartWorker, source: dict[str, str], declare: Any
) -> None:
    declare(Order, name="paced", limits=Limits(rate=PACED))
    ids = overdue(DUE)
    for _ in range(2):
        start_worker(POLICIES="paced", **source)
    effects = Effect.objects.filter(what="paced").order_by("at")
    wait_until(lambda: effects.count() > 20, "some have fired")
    others = latecomers(20)
    wait_until(lambda: fired(others) == 20, "the others have fired")
    assert effects.count() < DUE - 40, "the others had to wait"
    wait_until(lambda: effects.count() == DUE, "all have fired", 60 + DUE / 10)
    begins = [effect.at for effect in effects]
    in_a_second = (DUE - 1) / (begins[-1] - begins[0]).total_seconds()
    sys.stdout.write(f"{in_a_second:.1f} began in a second\n")
    # Without a tenth of the period: on a busy machine a process may pause between its slot and its note.
    assert most_within(0.9 * PACED.per, begins) <= PACED.count
    assert in_a_second <= 20
    moved = [abs(ids.index(effect.timeout_id or 0) - number) for number, effect in enumerate(effects)]
    # What a busy machine could not begin in its slot comes after what was assigned meanwhile: one second and a half,
    # and sometimes again.
    assert sum(moved) / len(moved) <= 12, "not in the order of the deadlines"
    assert max(moved) <= 120
