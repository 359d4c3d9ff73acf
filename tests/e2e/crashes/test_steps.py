"""Real workers that are killed at the steps of a policy: each step runs once, or was passed, and never out of order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.rounds.memory import DIED
from tests.support.processes import StartWorker, settled
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order
from tests.testapp.timeouts import declare_collect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]
IN_ORDER = ["collect early", "collect outside", "collect firm:1", "collect firm:2", "collect"]
ALL_OVER = {"early", "outside", "firm:2"}


@pytest.fixture
def policy() -> Iterator[Any]:
    declared = declare_collect()
    yield declared
    registry.remove(declared)


def check(row: Timeout) -> None:
    """Each step has one effect, or was passed; outside a transaction it may be there twice, under one key."""
    row.refresh_from_db()
    found = list(Effect.objects.filter(timeout_id=row.pk).order_by("id").values_list("what", "idempotency_key"))
    ran = [what for what, _ in found]
    assert len(set(found)) == len(set(ran)), "one key for each step"
    assert all(ran.count(what) == 1 for what in ran if what != "collect outside")
    once = list(dict.fromkeys(ran))
    assert once == [what for what in IN_ORDER if what in once], "never out of order"
    if row.state == "dead":  # by chance three workers were killed while it was alone with them
        assert row.reason == DIED
        return
    assert (row.state, once[-1]) == ("fired", "collect")
    assert set(row.steps_over.split()) == ALL_OVER
    passed = {name for event in row.history if event["what"] == "steps_passed" for name in event["step"].split(", ")}
    # One outside a transaction may have had its effect before its worker was killed.
    assert {f"collect {name}" for name in passed} - {"collect outside"} == set(IN_ORDER) - set(once) - {
        "collect outside"
    }


@pytest.mark.parametrize(
    ("checkpoint", "source"),
    [("marked", "redis"), ("committed", "ledger"), ("settled", "redis")],
)
def test_whatever_worker_is_killed_the_steps_run_in_order(
    start_worker: StartWorker, policy: Any, checkpoint: str, source: str
) -> None:
    """Kill one worker after the other: at `checkpoint`, or when it has had an effect, wherever it is then."""
    variables = {"POLICIES": "collect"} | ({"WITHOUT_REDIS": "1"} if source == "ledger" else {})
    rows = [dq.schedule_timeout(Order.objects.create(status="new"), policy, seconds=6) for _ in range(3)]
    for doom in ({"KILL_AT": checkpoint}, {}, {"KILL_AT": checkpoint}, {}):
        worker, before = start_worker(**doom, **variables), Effect.objects.count()
        acts = (lambda: worker.poll() is not None) if doom else (lambda: Effect.objects.count() > before)  # noqa: B023
        wait_until(lambda: acts() or settled(3)(), "it is killed, has an effect, or all is done")  # noqa: B023
        worker.kill()
        assert worker.wait(30) == -signal.SIGKILL
    heir = start_worker(**variables)
    wait_until(settled(3), "the last one has done the rest")
    heir.kill()
    heir.wait(30)
    for row in rows:
        check(row)
    assert "fired" in {row.state for row in rows}
