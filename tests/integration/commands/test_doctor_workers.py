"""`delayq_doctor` about workers that run, and cannot use Redis or the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.core.checks import INFO, WARNING
from django.db import connection

from django_delayq.redis_clients import forget_engine
from django_delayq.worker.servers import REDIS_AWAY
from tests.integration.commands.conftest import a_worker
from tests.integration.commands.test_status_and_doctor import found, worst
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_that_does_not_use_redis_is_found_although_redis_answers_the_doctor(settings: Settings) -> None:
    """Redis is a replica that refuses writes, or a firewall separates it from the machine of the worker."""
    a_worker()
    assert found("workers.redis") == []
    a_worker(host="shop2", uses_redis=False)
    level, words = worst("workers.redis")
    assert (level, worst("redis")[0]) == (WARNING, INFO)
    assert "shop2:7 does not use Redis" in words and f'"{REDIS_AWAY}"' in words
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert found("workers.redis") == []


def test_a_database_that_accepts_no_writes_is_named_beside_the_missing_heartbeats() -> None:
    """The workers run, and to start one, which the first finding recommends, would not help."""
    to_read_only = {
        "sqlite": ("PRAGMA query_only = ON", "PRAGMA query_only = OFF"),
        "postgresql": ("SET default_transaction_read_only = on", "SET default_transaction_read_only = off"),
        "mysql": ("SET SESSION TRANSACTION READ ONLY", "SET SESSION TRANSACTION READ WRITE"),
    }
    begin, end = to_read_only[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(begin)
        try:
            words = [finding.msg for finding in found("workers")]
        finally:
            cursor.execute(end)
    assert words[0] == "No worker is running: nothing fires."
    assert any("read" in each.lower() and "only" in each.lower() for each in words[1:])
    assert len(found("workers")) == 1


def test_the_line_of_the_log_to_which_the_doctor_refers_is_in_the_plain_log(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain lines have no names of events."""
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    running = RunningWorker(concurrency=1)
    try:
        wait_until(lambda: any(line.getMessage().endswith(REDIS_AWAY) for line in caplog.records))
        wait_until(lambda: found("workers.redis"))
        assert "redis_away" not in worst("workers.redis")[1]
    finally:
        running.stop()
        forget_engine()
