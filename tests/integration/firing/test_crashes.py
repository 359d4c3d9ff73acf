"""SIGKILL at each step of a firing: one effect each, none lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connections
from django.utils import timezone

from django_delayq.firing import settle_expired
from django_delayq.firing.handler import CHECKPOINTS
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine
from tests.integration.firing.conftest import due, fire, make_due, state
from tests.integration.firing.handlers import once_at
from tests.integration.firing.rows import FIRED, PENDING, tried
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
INSIDE = [step for step in CHECKPOINTS if step not in {"asked", "noted", "settled", "undone", "recorded"}]
OUTSIDE = [step for step in CHECKPOINTS if step not in {"asked", "noted", "undone", "recorded"}]


def exit_code_of(act: Callable[[], object]) -> int | None:
    """Return how a process ends that does `act`. It is a fork: nothing is imported a second time."""
    connections.close_all()  # parent and child must not share a connection
    forget_engine()
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(60)
    return child.exitcode


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while(act: Callable[[], object], step: str) -> None:
    """A process that does `act` has been killed when a firing came to `step`."""

    def act_until() -> None:
        once_at(step, kill)
        act()

    assert exit_code_of(act_until) == -signal.SIGKILL


def killed_at(step: str, row: Timeout, deliveries: int = 1) -> None:
    """A process that fires `row` has been killed at `step`."""
    killed_while(lambda: fire(row, deliveries=deliveries), step)


@pytest.mark.parametrize("step", INSIDE)
def test_a_process_killed_while_it_fires_leaves_one_effect(order: Order, step: str) -> None:
    # Where one statement locks, checks and marks, only a batch comes to the steps between.
    policy = "remind_many" if step in {"locked", "checked"} else "cancel_unpaid"
    row = due(order, policy)
    killed_at(step, row)
    committed = step in {"committed", "reported"}
    assert state(row) == (FIRED if committed else PENDING)
    assert Effect.objects.count() == committed
    report = fire(row, deliveries=2)
    assert report.done == (row.pk,)
    assert tried(row) == (FIRED, 1)
    assert Effect.objects.count() == 1
    order.refresh_from_db()
    assert (order.note == "reminded") if policy == "remind_many" else (order.status == "cancelled")


@pytest.mark.parametrize("step", ["undone", "recorded"])
def test_a_process_killed_around_the_recording_of_a_failure_loses_at_most_the_record(order: Order, step: str) -> None:
    row = due(order, "kill_worker")
    killed_at(step, row)
    assert state(row) == PENDING
    assert row.attempts == (1 if step == "recorded" else 0)
    for _ in range(5):
        make_due(row)
        fire(row, deliveries=2)
    assert tried(row) == (("dead", "retries"), 3)


@pytest.mark.parametrize("step", OUTSIDE)
def test_a_process_killed_while_it_fires_outside_leaves_at_least_one_effect_with_one_key(
    order: Order, step: str
) -> None:
    row = due(order, "send_outside")
    killed_at(step, row)
    marked = step in {"committed", "handled"}
    settled = step in {"settled", "reported"}
    assert state(row) == ("firing", "") if marked else FIRED if settled else PENDING
    Timeout.objects.filter(state="firing").update(run_at=timezone.now() - timedelta(seconds=1))
    settle_expired("default")
    fire(row, deliveries=2)
    assert state(row) == FIRED
    assert Effect.objects.count() == (2 if step == "handled" else 1)
    assert set(Effect.objects.values_list("idempotency_key", flat=True)) == {row.idempotency_key}
