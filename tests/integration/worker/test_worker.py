"""A worker fires what falls due, with Redis and without."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from pytest_django import Settings

from django_delayq import Retry, cancel_timeout, clock, reschedule_timeout
from django_delayq.firing import running
from django_delayq.ledger.claiming import claimable
from django_delayq.ledger.search import labels_in
from django_delayq.models import Timeout
from django_delayq.worker import Worker
from django_delayq.worker.dispatch import Dispatch
from tests.support.waiting import wait_until
from tests.support.workers import (
    Declare,
    StartWorker,
    all_are,
    due_orders,
    events,
    needs_more_connections,
    queue_in_redis,
    states,
)
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


class Gate:
    """A handler that waits until the test opens the gate."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.calls = 0

    def __call__(self, order: Order, timeout: Timeout) -> None:
        self.calls += 1
        self.entered.release()
        assert self.open.wait(100)


@pytest.fixture
def gated(declare: Declare) -> Callable[[int], Gate]:
    """`gated(3)` makes so many timeouts of the policy "gate", which run outside a transaction."""

    def do(count: int) -> Gate:
        gate = Gate()
        due_orders(declare(Order, handler=gate, name="gate", atomic=False), count)
        return gate

    return do


@pytest.mark.usefixtures("source")
def test_nothing_is_fired_before_its_deadline(start_worker: StartWorker) -> None:
    start_worker()
    cancelled, moved = due_orders("remind", 2, seconds=2)
    cancel_timeout(cancelled, "remind")
    reschedule_timeout(moved, "remind", hours=2)
    due_orders("remind", 10, seconds=0.3)
    wait_until(lambda: states() == {"fired": 10, "pending": 1, "cancelled": 1})
    for row in Timeout.objects.filter(state="fired"):
        assert row.settled_at is not None
        assert row.settled_at >= row.due_at


@needs_more_connections
@pytest.mark.usefixtures("source")
def test_several_workers_fire_each_timeout_once(start_worker: StartWorker) -> None:
    for _ in range(3):
        start_worker(concurrency=2)
    due_orders("remind", 30)
    wait_until(all_are("fired"))
    assert Effect.objects.count() == 30


@pytest.mark.usefixtures("source")
def test_a_handler_that_fails_is_tried_again_and_then_dead(start_worker: StartWorker, declare: Declare) -> None:
    calls = []

    def fail(order: Order, timeout: Timeout) -> None:
        calls.append(order.pk)
        raise RuntimeError("no")

    due_orders(declare(Order, handler=fail, name="fails", retry=Retry([0, 0.1])), 2)
    start_worker()
    wait_until(all_are("dead"))
    assert len(calls) >= 6
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {3}


@pytest.mark.usefixtures("source")
def test_an_object_that_others_hold_is_waited_for(start_worker: StartWorker) -> None:
    (timeout,) = due_orders("remind")
    with transaction.atomic():
        Order.objects.filter(pk=timeout.object_id).update(note="held")
        running = start_worker()
        threading.Event().wait(0.3)  # time to try in; whether it did makes no difference to what must hold
        assert running.is_running
    wait_until(all_are("fired"))
    assert Timeout.objects.get().attempts == 1


def test_stopping_gives_back_at_once_what_has_not_begun(
    start_worker: StartWorker, gated: Callable[[int], Gate], source: str
) -> None:
    gate = gated(10)
    running = start_worker(concurrency=3)
    busy = max(1, running.worker.concurrency - 1)  # one thread is kept free; a small pool allows fewer
    for _ in range(busy):
        assert gate.entered.acquire(timeout=30)
    running.worker.stop()
    wait_until(lambda: count_free(source) == 10 - busy)
    assert running.is_running, "a running handler is waited for"
    gate.open.set()
    running.join()
    assert states() == {"fired": busy, "pending": 10 - busy}
    assert gate.calls == busy
    start_worker()
    wait_until(all_are("fired"))
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}
    assert not any(event["what"] == "suspected" for row in Timeout.objects.all() for event in row.history)


def count_free(source: str) -> int:
    """How many timeouts another worker could take now."""
    if source == "redis":
        return queue_in_redis().stats().due
    labels = labels_in(Timeout.objects.using("default"))
    return sum(claimable("default", None, label).filter(claims=0).count() for label in labels)


@pytest.mark.usefixtures("without_redis")
def test_max_timeouts_ends_the_worker_after_exactly_so_many(
    start_worker: StartWorker, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(objects: Any, timeouts: list[Timeout]) -> None:
        if len(timeouts) > 1:
            raise ValueError

    due_orders("remind", 10)
    start_worker(max_timeouts=7).join()
    assert states() == {"fired": 7, "pending": 3}
    monkeypatch.setattr(running, "WORK_SECONDS", 0.0)  # each work fires one of its batch alone, and releases the rest
    due_orders(declare(Order, handler, name="brief", batch=10, queue="brief"), 6)
    start_worker(queues=["brief"], max_timeouts=4, concurrency=1).join()
    assert states() == {"fired": 11, "pending": 5}, "what is released untried does not count"


@pytest.mark.usefixtures("source")
def test_a_worker_serves_the_queues_it_was_given_or_all_and_warns_of_one_that_nobody_knows(
    start_worker: StartWorker, declare: Declare, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": timedelta(milliseconds=100)}
    due_orders(declare(Order, name="mail", queue="mail"), 3)
    due_orders("remind", 2)
    old = due_orders("remind", 3, minutes=10)
    Timeout.objects.filter(pk__in=[row.pk for row in old]).update(queue="of old")
    start_worker(queues=["mial", "mail", "of old"], burst=True).join()
    assert states() == {"fired": 3, "pending": 5}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[-1] == "No policy uses the queue 'mial'. Did you mean 'mail'?"
    assert events(caplog) == ["queue_unknown"]
    Timeout.objects.filter(queue="of old").update(run_at=clock.now())
    start_worker()  # also of a queue that only rows name
    wait_until(all_are("fired"))


@needs_more_connections
@pytest.mark.usefixtures("without_redis")
def test_a_lease_is_extended_for_as_long_as_the_handler_runs(
    start_worker: StartWorker, gated: Callable[[int], Gate], settings: Settings
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(seconds=3)}
    gate = gated(1)
    start_worker(concurrency=1)
    assert gate.entered.acquire(timeout=30)
    due_orders("remind", 1)
    start_worker(concurrency=1)  # would take it as soon as the lease lapsed
    wait_until(lambda: Timeout.objects.get(policy="testapp.order.remind").state == "fired")
    expiry = Timeout.objects.get(policy="testapp.order.gate").run_at
    wait_until(lambda: Timeout.objects.get(policy="testapp.order.gate").run_at > expiry + timedelta(seconds=4))
    gate.open.set()
    wait_until(all_are("fired"))
    assert gate.calls == 1
    assert Timeout.objects.get(policy="testapp.order.gate").attempts == 1


@pytest.mark.parametrize("check", ["is_burst_over", "worked_on"])
def test_a_stop_during_a_check_is_not_lost(with_redis: Any, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """A signal may arrive between any two instructions, such as those that decide whether the worker is to end."""
    checks: list[object] = []

    def stop(*_: object) -> int:
        if not checks or len(checks) > 10:
            worker.stop()
        checks.append(check)
        return 0

    if check == "worked_on":
        monkeypatch.setattr(Dispatch, "worked_on", property(stop, lambda *_: None), raising=False)
    else:
        monkeypatch.setattr(Worker, "_is_burst_over", stop)
    worker = Worker(burst=check == "is_burst_over")
    worker.run()
    assert len(checks) < 10
