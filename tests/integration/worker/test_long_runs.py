"""A handler that takes long is in the log: after a second, with what it waits for, and again when a lease is over."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from pytest_django import Settings

from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, needs_more_connections
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
LEASE = timedelta(milliseconds=400)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    """No test inherits that a policy was in the log within the last minute."""
    firing_state.forget()


@pytest.mark.usefixtures("with_redis")
@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}], ids=["inside", "outside", "batch"])
def test_a_handler_that_outlives_its_lease_is_told_of_and_fired_once(
    start_worker: StartWorker,
    declare: Callable[..., Any],
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": LEASE}
    go_on, calls = threading.Event(), []

    def hang(target: Any, told: Any) -> None:
        calls.append(told)
        assert go_on.wait(30)

    policy = declare(Order, hang, name="hangs", **options)
    [row] = due_orders(policy)
    start_worker(concurrency=2)
    try:
        wait_until(lambda: len(warnings(caplog)) >= 2)
        wait_until(lambda: warnings(caplog)[-1].seconds >= 2 * LEASE.total_seconds())
    finally:
        go_on.set()
    wait_until(all_are("fired"))
    assert len(calls) == 1
    assert Timeout.objects.get().attempts == 1
    for record in warnings(caplog):
        assert (record.policy, record.timeout_id, record.timeout_ids) == (policy.label, row.pk, (row.pk,))
        assert f"timeout {row.pk}" in record.getMessage()


def warnings(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [
        record
        for record in caplog.records
        if getattr(record, "event", "") == "handler_runs_long" and record.levelno == logging.WARNING
    ]


def slow(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", "") == "handler_slow"]


@pytest.fixture
def hangs(declare: Callable[..., Any]) -> Any:
    """Declares policies whose handlers run until the test is over."""
    go_on = threading.Event()

    def wait_for_the_test(*_: Any) -> None:
        assert go_on.wait(30)

    def do(name: str, **options: Any) -> Any:
        return declare(Order, wait_for_the_test, name=name, atomic=False, **options)

    yield do
    go_on.set()


@needs_more_connections
@pytest.mark.usefixtures("source")
def test_a_slow_handler_is_logged_after_a_second_with_its_place(
    start_worker: StartWorker, hangs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="django_delayq.firing")
    policy = hangs("hangs")
    [row] = due_orders(policy)
    start_worker(concurrency=2)
    wait_until(lambda: slow(caplog))
    [record] = slow(caplog)
    assert (record.levelno, record.policy) == (logging.INFO, policy.label)
    assert (record.timeout_id, record.timeout_ids) == (row.pk, (row.pk,))
    assert 1 <= record.seconds < 10
    assert "in the handler, at worker/test_long_runs.py:" in record.getMessage()
    assert "in wait_for_the_test" in record.getMessage()
    assert f"timeout {row.pk} of object {row.object_id}" in record.getMessage()
    assert "1 of 2 threads are busy" in record.getMessage()


@needs_more_connections
@pytest.mark.usefixtures("with_redis")
@pytest.mark.parametrize(
    "case",
    [((2, 1), 5, logging.INFO), ((1, 1), 2, logging.WARNING)],
    ids=["several of one policy", "all threads are busy"],
)
def test_each_policy_with_slow_handlers_is_one_line_and_a_warning_when_all_threads_are_busy(
    start_worker: StartWorker, hangs: Any, caplog: pytest.LogCaptureFixture, case: tuple[tuple[int, int], int, int]
) -> None:
    counts, threads, level = case
    caplog.set_level(logging.INFO, logger="django_delayq.firing")
    policies = [hangs("first"), hangs("second")]
    for policy, count in zip(policies, counts, strict=True):
        due_orders(policy, count)
    start_worker(concurrency=threads)
    wait_until(lambda: len(slow(caplog)) == 2)
    assert {(each.levelno, each.policy) for each in slow(caplog)} == {(level, policy.label) for policy in policies}


@pytest.mark.usefixtures("with_redis")
def test_a_coroutine_that_waits_is_logged_with_its_place(
    start_worker: StartWorker, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="django_delayq.firing")

    ends: list[Callable[[], object]] = []

    async def deep_inside() -> None:
        end = asyncio.Event()
        ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, end.set))
        await end.wait()

    async def waits(order: Order, timeout: Timeout) -> None:
        await deep_inside()

    due_orders(declare(Order, waits, name="waits", atomic=False))
    start_worker(concurrency=2)
    try:
        wait_until(lambda: slow(caplog))
    finally:
        for end in ends:
            end()
    assert "in waits > worker/test_long_runs.py" in slow(caplog)[0].getMessage()
    assert "in deep_inside" in slow(caplog)[0].getMessage()


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no statement that takes its time")
@pytest.mark.usefixtures("with_redis")
def test_a_statement_that_takes_long_is_named_without_its_values(
    start_worker: StartWorker, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="django_delayq.firing")

    def asks(order: Order, timeout: Timeout) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(4)" if connection.vendor == "postgresql" else "SELECT sleep(4)")

    due_orders(declare(Order, asks, name="asks"))
    start_worker(concurrency=2)
    wait_until(lambda: slow(caplog))
    assert "waits for the database, in a statement SELECT, at" in slow(caplog)[0].getMessage()
    assert "sleep" not in slow(caplog)[0].getMessage()


@pytest.mark.usefixtures("with_redis")
def test_the_thread_that_watches_handlers_rests_while_none_runs(
    start_worker: StartWorker, declare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr("django_delayq.firing.executors.SLOW_SECONDS", 0.02)
    monkeypatch.setattr("django_delayq.firing.executors.log_long_runs", lambda *_: looks.append(time.monotonic()))
    go_on = threading.Event()
    policy = declare(Order, lambda order, timeout: go_on.wait(30), name="waits")
    start_worker()
    time.sleep(0.1)
    assert not looks
    for _ in range(2):  # it rests again, and wakes again
        go_on.clear()
        due_orders(policy)
        before = len(looks)
        try:
            wait_until(lambda before=before: len(looks) > before + 5)  # type: ignore[misc]
        finally:
            go_on.set()
        wait_until(all_are("fired"))
        wait_until(lambda: looks[-1] < time.monotonic() - 0.3)
