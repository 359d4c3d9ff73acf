"""Workers, with Redis and without, follow what operators put in force."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.utils import timezone

from django_delayq.engine.engine import Engine
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import fire_now, hold, pause, resume, shadow
from django_delayq.operations.changes import ABANDONED_AFTER
from django_delayq.redis_clients import get_engine
from django_delayq.worker import Worker
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sweep import Sweep
from tests.integration.operations.conftest import BY, pending
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, due_orders, states
from tests.testapp.models import Effect, Order

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

REMIND = "testapp.order.remind"


@pytest.fixture
def worker(source: str, settings: Settings) -> Iterator[RunningWorker]:
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": timedelta(milliseconds=200)}
    running = RunningWorker(concurrency=2)
    yield running
    running.stop()


def fires(label: str) -> int:
    return Timeout.objects.filter(policy=label, state="fired").count()


def witness(label: str = "linger") -> None:
    """A timeout of another policy that is due last has fired: the worker has checked all others."""
    row = due_orders(label)[0]
    wait_until(lambda: Timeout.objects.filter(pk=row.pk, state="fired").exists())


def test_nothing_of_a_paused_policy_fires_and_all_of_it_when_it_goes_on(worker: RunningWorker) -> None:
    pause(REMIND, by=BY)
    due_orders("remind", 20)
    witness()
    witness()
    assert fires(REMIND) == 0
    assert not Effect.objects.filter(what="remind").exists()
    resume(REMIND, by=BY)
    wait_until(lambda: fires(REMIND) == 20)
    assert Effect.objects.filter(what="remind").count() == 20


def test_a_pause_that_ends_by_itself_brings_its_timeouts_back(worker: RunningWorker) -> None:
    pause(REMIND, by=BY, until=timezone.now() + timedelta(days=1))
    due_orders("remind", 5)
    witness()
    assert fires(REMIND) == 0
    PolicyControl.objects.update(until=timezone.now())
    wait_until(lambda: fires(REMIND) == 5)


def test_what_was_held_fires_after_its_release_at_its_new_deadline(worker: RunningWorker) -> None:
    hold(REMIND, by=BY)
    rows = due_orders("remind", 3)
    witness()
    assert fires(REMIND) == 0
    resume(REMIND, by=BY)
    wait_until(lambda: fires(REMIND) == 3)
    for row in Timeout.objects.filter(pk__in=[row.pk for row in rows]):
        assert row.due_at > row.first_due_at
        assert row.settled_at is not None and row.settled_at >= row.due_at


def test_a_worker_carries_on_with_a_release_whose_process_died(
    worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(REMIND, by=BY)
    rows = due_orders("remind", 3)
    with monkeypatch.context() as patched:
        patched.setattr("django_delayq.operations.policies.run_move", lambda change, *_: change)
        resume(REMIND, by=BY)
    witness()
    assert fires(REMIND) == 0
    PolicyChange.objects.update(touched_at=timezone.now() - 2 * ABANDONED_AFTER)
    wait_until(lambda: fires(REMIND) == len(rows))


def test_what_is_told_to_fire_now_fires(worker: RunningWorker) -> None:
    row = pending(Order.objects.create(), hours=5)
    witness()
    assert states() == {"pending": 1, "fired": 1}
    assert fire_now(row, by=BY).changed == 1
    wait_until(lambda: fires(REMIND) == 1)


@pytest.mark.usefixtures("source")
def test_a_burst_does_not_wait_for_what_is_paused() -> None:
    pause(REMIND, by=BY)
    due_orders("remind", 3)
    due_orders("linger", 1)
    Worker(burst=True, concurrency=2).run()
    assert states() == {"pending": 3, "fired": 1}


def test_the_sweep_restores_what_is_paused_like_all_others(redis_client: redis.Redis) -> None:
    """Its line is not asked while it is paused."""
    engine = get_engine("default")
    assert isinstance(engine, Engine)
    pause(REMIND, by=BY)
    rows = due_orders("remind", 2)
    queue = engine.queue("default", 0)
    queue.remove(REMIND, [row.pk for row in rows])
    Sweep(engine, "default", ClockSkew("default")).run_once(everything=True)
    assert queue.stats().due == 2


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("set_to", ["on", "off"])
def test_a_guard_rail_is_followed_within_two_seconds(monkeypatch: pytest.MonkeyPatch, set_to: str) -> None:
    shares, [start, end] = {"on": 100, "off": 0}, sorted(["on", "off"], key=lambda each: each == set_to)
    shadow(REMIND, share=shares[start], by=BY)
    due_orders("remind")
    wait_until(lambda: not Timeout.objects.unsettled().exists())
    # As if another process had changed it: this worker is not notified.
    monkeypatch.setattr(type(controls.stop_cache), "forget", lambda self: None)
    shadow(REMIND, share=shares[end], by=BY)
    changed = time.monotonic()
    expected = "shadow" if set_to == "on" else "due"
    while True:
        began, [row] = time.monotonic(), due_orders("remind")
        wait_until(lambda: Timeout.objects.filter(pk=row.pk, settled_at__isnull=False).exists())  # noqa: B023
        if Timeout.objects.get(pk=row.pk).cause == expected:
            break
        assert began - changed < 2
