"""SIGKILL at each step of a firing, handlers that kill their process, SIGTERM, SIGSTOP: each timeout fires once."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from django.db import connection

from django_delayq import Retry
from django_delayq.contrib.webhooks.models import Delivery
from tests.integration.contrib.webhooks.conftest import SECRET, EndpointServer, endpoint
from tests.support.processes import SHORT, StartWorker, due_now, effects, end, is_stopped, settled, states
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

__all__ = ["endpoint"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]
LONG_LEASE = {**SHORT, "LEASE": 300.0}


# Each database at the steps between two of its statements.
ON_EACH = [pytest.param(step, marks=pytest.mark.dialect) for step in ("locked", "marked", "handled", "committed")]


@pytest.mark.parametrize("step", ["planned", "begun", "checked", "reported", *ON_EACH])
def test_killed_at_any_step_it_fires_once(start_worker: StartWorker, endpoint: EndpointServer, step: str) -> None:
    """Also each webhook is delivered, once or more under one id, and none is about what did not happen."""
    # Where one statement locks, checks and marks, only a batch comes to the steps between.
    policy = "remind_many" if step in {"locked", "checked"} else "remind"
    webhooks = json.dumps({"billing": {"url": endpoint.url, "secret": SECRET, "events": ["fired"]}})
    rows = due_now(policy, 3)
    doomed = start_worker(KILL_AT=step, WEBHOOKS=webhooks)
    assert doomed.wait(30) == -signal.SIGKILL
    heir = start_worker(WEBHOOKS=webhooks)
    rows += due_now(policy)  # so that there is something to do for it whatever the step
    wait_until(settled(8), "the other worker has fired the rest, and sent all messages, which are timeouts, too")
    end(heir)
    by_id = {each.headers["webhook-id"]: each.body["data"]["id"] for each in endpoint.received}
    assert sorted(by_id.values()) == sorted(row.pk for row in rows)
    assert effects(policy) == {row.pk: 1 for row in rows}
    assert states() == {"fired": 8}
    assert Delivery.objects.filter(delivered_at__isnull=False).count() == 4


@pytest.mark.dialect
@pytest.mark.parametrize("step", ["committed", "handled", "settled"])
def test_killed_outside_a_transaction_it_is_done_at_least_once_under_one_key(
    start_worker: StartWorker, step: str
) -> None:
    (row,) = due_now("send_outside")
    doomed = start_worker(KILL_AT=step)
    assert doomed.wait(30) == -signal.SIGKILL
    heir = start_worker()
    due_now("remind")  # so that there is something to do for it whatever the step
    wait_until(settled(2), "the heir has settled it")
    end(heir)
    assert states() == {"fired": 2}
    assert effects("send_outside")[row.pk] in ({1, 2} if step == "handled" else {1})
    keys = Effect.objects.filter(what="send_outside").values_list("idempotency_key", flat=True)
    assert set(keys) == {row.idempotency_key}


@pytest.mark.dialect
def test_one_killer_among_a_hundred_ends_dead_and_the_others_fire(start_worker: StartWorker, declare: Any) -> None:
    """None of them may be tried again: running beside a handler that ends its process counts no attempt."""
    for name in ("deadly", "harmless"):
        declare(Order, name=name, retry=Retry.never())
    (killer,), innocents = due_now("deadly"), due_now("harmless", 99)
    deaths = 0
    while True:
        worker = start_worker(POLICIES="deadly harmless")
        wait_until(lambda: worker.poll() is not None or settled(100)(), "it dies or all is done")  # noqa: B023
        if worker.poll() is None:
            break
        assert worker.returncode == 7
        deaths += 1
        assert deaths < 10, "the handler ends its process indefinitely"
    end(worker)
    killer.refresh_from_db()
    assert (killer.state, killer.cause, killer.attempts, killer.deaths) == ("dead", "retries", 0, 3)
    assert killer.reason == "The process died 3 times while this timeout ran alone in it."
    assert effects("harmless") == {row.pk: 1 for row in innocents}
    assert states() == {"fired": 99, "dead": 1}


def test_terminated_under_load_it_leaves_nothing_to_wait_for(start_worker: StartWorker) -> None:
    """With a lease of five minutes, the next worker could not finish within the test if a lease remained."""
    rows = due_now("linger", 300)
    first = start_worker(seconds=LONG_LEASE, LINGER="0.2")  # it cannot finish before the signal
    wait_until(lambda: len(effects("linger")) >= 10, "it is in the middle of it")
    end(first)
    assert len(effects("linger")) < 300, "it was not in the middle of it"
    second = start_worker(seconds=LONG_LEASE)
    wait_until(settled(300), "the next one has done the rest")
    end(second)
    assert effects("linger") == {row.pk: 1 for row in rows}


@pytest.mark.dialect
@pytest.mark.parametrize("step", ["planned", "marked"])
def test_a_worker_that_slept_past_its_lease_fires_nothing_twice(start_worker: StartWorker, step: str) -> None:
    if connection.vendor == "sqlite":  # also that of another thread of its process, at whatever step this one sleeps
        pytest.skip("a SQLite transaction that sleeps keeps everybody waiting until it wakes")
    (row,) = due_now("remind")
    sleeper = start_worker(STOP_AT=step)
    wait_until(lambda: is_stopped(sleeper.pid), "it sleeps in the middle of a firing")
    other = start_worker()
    (bystander,) = due_now("remind")
    wait_until(lambda: bystander.pk in effects("remind"), "the other one is at work")
    if step == "planned":
        wait_until(settled(2), "the other worker has continued")
    sleeper.send_signal(signal.SIGCONT)
    wait_until(settled(2), "all is done")
    for worker in (sleeper, other):
        end(worker)
    assert effects("remind") == {row.pk: 1, bystander.pk: 1}
