"""Processes that end in the middle of others' handlers: only what ends its process each time is dead."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from django_delayq import Retry
from django_delayq.models import Timeout
from tests.support.processes import SHORT, StartWorker, due_now, effects, end, settled, states
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]
POLICIES = ("harmless", "harmless_outside", "deadly", "deadly_outside")


@pytest.fixture(params=["", "_outside"], ids=["atomic-redis", "outside-ledger"])
def suffix(request: pytest.FixtureRequest, declare: Any) -> str:
    """Return how the names of the policies end. Those outside a transaction are fired from the ledger."""
    for name in POLICIES:
        declare(Order, name=name, retry=Retry.never(), atomic=not name.endswith("_outside"))
    return str(request.param)


@pytest.fixture
def start(suffix: str, start_worker: StartWorker) -> Callable[[], subprocess.Popen[bytes]]:
    variables = {"POLICIES": " ".join(POLICIES)} | ({"WITHOUT_REDIS": "1"} if suffix else {})
    return partial(start_worker, "--concurrency", "4", seconds={**SHORT, "LEASE": 2.0}, **variables)


def test_what_runs_beside_a_handler_that_ends_its_process_is_not_dead(
    start: Callable[[], subprocess.Popen[bytes]], suffix: str
) -> None:
    (killer,) = due_now(f"deadly{suffix}")
    innocents = due_now(f"harmless{suffix}", 20)
    deaths, worker = 0, start()
    while True:
        wait_until(lambda: worker.poll() is not None or settled(21)(), "it dies, or all is done")  # noqa: B023
        if worker.poll() is None:
            break
        assert worker.returncode == 7
        deaths += 1
        assert deaths < 8, "the handler ends its process indefinitely"
        worker = start()
    end(worker)
    killer.refresh_from_db()
    assert states() == {"fired": 20, "dead": 1}
    assert (killer.state, killer.cause, killer.attempts, killer.deaths) == ("dead", "retries", 0, 3)
    assert killer.reason == "The process died 3 times while this timeout ran alone in it."
    assert effects("harmless").keys() == {row.pk for row in innocents}
    assert set(Timeout.objects.exclude(pk=killer.pk).values_list("attempts", flat=True)) == {1}
