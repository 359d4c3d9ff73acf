"""A handler that hangs keeps its lease, and the log tells of it: at once when a lease is over, and then ever less."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from django_delayq.models import Timeout
from tests.integration.worker.running import StartWorker, all_are, due_orders, wait_until
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)
LEASE = timedelta(milliseconds=400)


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
