"""Processes that die: SIGKILL at each step of a firing, and timeouts that kill their process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connections
from django.db.models import F
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import plan, run, settle_expired
from django_delayq.firing.handler import CHECKPOINTS, set_checkpoint_hook
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine
from tests.integration.firing.conftest import due, fire, make_due, state, work_of
from tests.integration.firing.handlers import Declare, Log, Patch, once_at, raising
from tests.integration.firing.rows import FIRED, PENDING, UNTRIED, hearing, logged, tried
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


def die_in_handler(*rows: Timeout, deliveries: int) -> None:
    """The process of the firing of `rows` is gone before the first handler's work is committed."""
    works, _ = plan({row.pk: deliveries for row in rows}, "default")
    set_checkpoint_hook(lambda step: raising(KeyboardInterrupt())() if step == "handled" else None)
    for work in works:
        with pytest.raises(KeyboardInterrupt):
            run(work, "default")
    set_checkpoint_hook(None)
    died = Timeout.objects.filter(pk__in=[row.pk for row in rows])
    died.update(suspected_at=F("suspected_at") - timedelta(days=1))  # and its lease has ended


def test_a_suspect_is_fired_alone_and_noted_before(orders: list[Order], declare: Declare, caplog: Log) -> None:
    seen: list[int] = []
    begun: list[tuple[str, int]] = []
    policy = declare(Order, lambda obj, timeout: seen.append(timeout.attempts), name="watched")
    rows = [due(order, policy) for order in orders]
    noted = Timeout.objects.filter(suspected_at__isnull=False)
    set_checkpoint_hook(lambda step: begun.append((step, noted.count())) if step in {"noted", "begun"} else None)
    fire(*rows, deliveries=2)
    assert seen == [1] * 5
    assert begun == [("noted", 1), ("begun", 1)] * 5 and not noted.exists(), "what has fired is under no suspicion"
    [line] = logged(caplog, "timeout_suspected")  # the others are not a warning each
    words = f"Timeout {rows[0].pk} ({policy.label}, object {orders[0].pk}) was held by a worker that died"
    assert line.levelname == "WARNING" and line.getMessage().startswith(words)
    assert {(tried(row), row.deaths, len(row.history)) for row in rows} == {((FIRED, 1), 0, 0)}


def test_a_killer_ends_dead_and_its_history_says_why(order: Order, declare: Declare, caplog: Log) -> None:
    row = due(order, declare(Order, name="killer", retry=dq.Retry.never()))
    die_in_handler(row, deliveries=1)
    for delivery in (2, 3, 4):
        die_in_handler(row, deliveries=delivery)
        assert (tried(row), row.deaths) == (UNTRIED, delivery - 2)
    with hearing(dq.timeout_dead) as heard:
        assert fire(row, deliveries=5).done == (row.pk,)
    assert (tried(row), row.deaths, len(heard)) == ((("dead", "retries"), 0), 3, 1)
    assert [(event["what"], event["number"]) for event in row.history] == [("suspected", n) for n in (1, 2, 3)]
    assert [line.levelname for line in logged(caplog, "timeout_dead")] == ["ERROR"]
    assert row.reason == "The process died 3 times while this timeout ran alone in it."
    assert "suspected of killing a worker, death 2" in str(dq.explain_timeout(order, "killer"))


@pytest.mark.parametrize(("held_alone", "deliveries"), [(True, 1), (True, 2), (False, 2)])
def test_what_does_not_get_in_is_released(order: Order, monkeypatch: Patch, held_alone: bool, deliveries: int) -> None:
    """A suspect runs alone in its process: others wait for it, and it for them, both for a limited time."""
    monkeypatch.setattr("django_delayq.firing.state.LOCKED_MAX_SECONDS", 0.01)
    row = due(order)
    work = work_of(row, deliveries=deliveries)
    with firing_state.gate.entered(alone=held_alone):
        report = run(work, "default")
    assert report.untried == (row.pk,)
    assert (tried(row), row.suspected_at) == (UNTRIED, None)
    assert fire(row, deliveries=deliveries).fired == (row.pk,)
