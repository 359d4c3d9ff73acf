"""`RemoteExecutor` with a queue in this process: what it sends, and how it learns what became of that."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connections
from pytest_django import Settings

from django_delayq import Retry, Snooze, operations, schedule_timeout
from django_delayq.conf import ConfigError
from django_delayq.contrib import remote
from django_delayq.contrib.remote import EXTEND_RETRY_SECONDS, RemoteExecutor, fire, outcomes
from django_delayq.firing import Work
from django_delayq.firing.executors import make_executor
from django_delayq.firing.running import EXTEND_LOCKED_SECONDS
from django_delayq.models import Timeout
from tests.integration.firing.test_outside import raise_busy
from tests.integration.operations.conftest import as_if
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, StartWorker, all_are, due_orders, events, needs_more_connections
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), needs_more_connections]
LEASE = timedelta(seconds=1)
LONG = timedelta(seconds=30)


class QueueExecutor(RemoteExecutor):
    """Sends JSON to a queue of this process."""

    queue: SimpleQueue[str | None] = SimpleQueue()

    def send(self, message: dict[str, Any]) -> None:
        self.queue.put(json.dumps(message))


class KillingExecutor(QueueExecutor):
    """The process that receives a message about `linger` dies of it."""

    killed: list[int] = []

    def send(self, message: dict[str, Any]) -> None:
        if message["policy"].endswith(".linger"):
            self.killed.append(1)
        else:
            super().send(message)


@pytest.fixture
def lasting(settings: Settings) -> Callable[[timedelta], None]:
    """`lasting(LEASE)`: from now on leases last so long."""

    def do(lease: timedelta) -> None:
        settings.DELAYQ = {**settings.DELAYQ, "LEASE": lease}

    return do


@pytest.fixture
def start(with_redis: Any, start_worker: StartWorker, settings: Settings) -> Callable[..., RunningWorker]:
    def do(executor: type[QueueExecutor] = QueueExecutor, lease: timedelta = LEASE) -> RunningWorker:
        settings.DELAYQ = {**settings.DELAYQ, "EXECUTOR": f"{__name__}.{executor.__name__}", "LEASE": lease}
        return start_worker()

    QueueExecutor.queue = SimpleQueue()
    return do


@pytest.fixture
def receive() -> Iterator[Callable[[], None]]:
    """Start a thread that receives messages, as the process of a task queue does."""
    threads: list[threading.Thread] = []

    def serve(queue: SimpleQueue[str | None]) -> None:
        try:
            while (message := queue.get()) is not None:
                fire(json.loads(message))
        finally:
            connections.close_all()

    def do() -> None:
        threads.append(threading.Thread(target=serve, args=[QueueExecutor.queue], daemon=True))
        threads[-1].start()

    yield do
    for _ in threads:
        QueueExecutor.queue.put(None)
    for thread in threads:
        thread.join(30)


def message_of(row: Timeout) -> dict[str, Any]:
    return {"version": 1, "policy": row.policy, "ids": [row.pk], "suspect": False, "using": "default"}


def received(declare: Any, handler: Callable[..., object], **options: Any) -> Timeout:
    """Return a timeout about which a message was received, which has ended."""
    (row,) = due_orders(declare(Order, handler, name="received", **options))
    fire(message_of(row))
    row.refresh_from_db()
    return row


def test_the_outcomes_tell_fired_timeouts_from_other_settled_ones_and_stopped_ones(order: Order) -> None:
    fired, cancelled = (schedule_timeout(order, "remind", hours=1, key=key) for key in "ab")
    as_if(fired, "fired", "due"), as_if(cancelled, "cancelled", "hand")
    report = outcomes(dict.fromkeys((fired.pk, cancelled.pk, 123_456), "testapp.order.remind"), "default")
    assert (set(report.done), report.fired) == ({fired.pk, cancelled.pk, 123_456}, (fired.pk,))
    paused, waiting = *due_orders("linger"), *due_orders("remind")
    operations.pause("testapp.order.linger", by="script:test")
    report = outcomes({row.pk: row.policy for row in (paused, waiting)}, "default")
    assert (set(report.again), report.untried) == ({paused.pk}, (paused.pk,))


def test_immediate_retries_and_snoozes_need_no_lease(start: Any, receive: Any, declare: Any, caplog: Any) -> None:
    calls: list[int] = []

    def handler(order: Order, timeout: Timeout) -> None:
        calls.append(timeout.attempts)
        if len(calls) == 1:
            raise RuntimeError("the first attempt fails")
        if len(calls) == 2:
            raise Snooze(seconds=2)

    declare(Order, handler, name="fails_then_snoozes", retry=Retry([0]))
    due_orders("fails_then_snoozes")
    receive()
    start()
    wait_until(all_are("fired"))
    assert len(calls) == 3
    assert "executor_lost" not in events(caplog)


def test_while_nothing_receives_few_messages_a_lease_are_sent_and_then_all_fire(
    start: Any, receive: Any, lasting: Any, caplog: Any
) -> None:
    rows, few = due_orders("remind", 60), 4
    work = Work(rows[0].policy, (rows[0].pk,), (rows[0].object_id,))
    lasting(LEASE / 5)
    executor = QueueExecutor("default", few)
    executor.submit(work, lambda *_: None)
    wait_until(lambda: "executor_silent" in events(caplog), "nothing was settled for a lease")
    lasting(LONG)
    for _ in range(few):
        executor.submit(work, lambda *_: None)
    with pytest.raises(TimeoutError, match="have settled no timeout"):
        executor.submit(work, lambda *_: None)
    executor.close()
    start()
    wait_until(lambda: events(caplog).count("executor_silent") == 2)
    receive()
    wait_until(all_are("fired"), seconds=110)
    assert Effect.objects.count() == len(rows)


def test_a_handler_that_kills_its_process_lease_after_lease_does_not_delay_other_timeouts(
    start: Any, receive: Any
) -> None:
    KillingExecutor.killed = []
    due_orders("linger")
    receive()
    start(KillingExecutor, 2 * LEASE)
    wait_until(lambda: len(KillingExecutor.killed) == 3, "nothing was settled for two leases")
    due_orders("remind")
    wait_until(lambda: Effect.objects.filter(what="remind").exists())
    assert len(KillingExecutor.killed) <= 4, "within a lease"


def test_the_receiving_process_extends_again_soon_what_was_locked_or_what_the_database_did_not_answer(
    lasting: Any, declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float | None] = []

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return len(pauses) == 4

    def extend(ids: Any, using: str) -> bool:
        if len(pauses) == 2:
            raise OperationalError("the server closed the connection")
        return len(pauses) == 3  # at first a row is locked

    monkeypatch.setattr(remote, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))
    monkeypatch.setattr(remote, "extend_firing", extend)
    lasting(LONG)
    received(declare, lambda order, timeout: wait_until(lambda: len(pauses) == 4), atomic=False)
    assert pauses == [10, EXTEND_LOCKED_SECONDS, EXTEND_RETRY_SECONDS, 10]


def test_the_receiving_process_repeats_a_handler_that_waits_for_a_lock_for_some_seconds_only(declare: Any) -> None:
    calls: list[int] = []

    def handler(order: Order, timeout: Timeout) -> None:
        calls.append(timeout.attempts)
        raise_busy()

    began = time.monotonic()
    assert received(declare, handler, atomic=False).attempts == 0
    assert 2 <= len(calls) <= 6
    assert time.monotonic() - began < 30


def test_the_executor_of_rq_needs_a_redis(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None, "EXECUTOR": "django_delayq.contrib.rq.RQExecutor"}
    with pytest.raises(ConfigError, match=r"RQExecutor needs DELAYQ\['REDIS'\]"):
        make_executor("default", 2)


WRONG: list[Any] = [
    None, [], "text", {}, {"policy": 1}, {"policy": "a" * 201}, {"ids": []}, {"ids": "12"}, {"ids": ["1"]},
    {"ids": [True]}, {"ids": [0]}, {"ids": [2**63]}, {"ids": list(range(1, 1002))}, {"suspect": 1}, {"suspect": None},
    {"using": "elsewhere"}, {"using": ["default"]},
]  # fmt: skip


def test_a_message_that_is_wrong_or_about_an_undeclared_policy_fires_nothing(caplog: Any) -> None:
    (row,) = due_orders("remind")
    genuine = message_of(row)
    for changes in WRONG:
        with pytest.raises(ValueError, match="This is not a message of RemoteExecutor: "):
            fire({**genuine, **changes} if changes and isinstance(changes, dict) else changes)
    fire({**genuine, "policy": "testapp.order.nonsense"})
    assert "not declared in this process" in caplog.text
    assert Timeout.objects.get().state == "pending"
    fire({**genuine, "new": "in a newer release"})
    assert Timeout.objects.get().state == "fired"
