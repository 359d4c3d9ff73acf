"""How many handler threads fit into a pool or a limit of connections, and what is logged if they do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core import checks
from django.db import connection
from pytest_django import Settings

from django_delayq.conf import ConfigError
from django_delayq.ledger.db_connections import Limit, pool_limit
from django_delayq.monitoring import doctor
from django_delayq.worker import Worker
from django_delayq.worker.supervisor import default_count
from tests.settings import POOL

pytestmark = pytest.mark.django_db
on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql" or bool(POOL), reason="of PostgreSQL, no pool")


@contextmanager
def pool(value: Any) -> Iterator[None]:
    """The settings ask for a pool; nothing opens a connection from it."""
    options = connection.settings_dict["OPTIONS"]
    options["pool"] = value
    try:
        yield
    finally:
        del options["pool"]


def test_as_many_handler_threads_run_as_there_are_connections_for() -> None:
    for is_pool, fitting in {True: {2: 1, 3: 1, 4: 2, 6: 4, 20: 4}, False: {4: 1, 6: 3, 7: 4}}.items():
        for size, threads in fitting.items():
            limit = Limit(size, "it", is_pool)
            assert limit.threads(4) == threads
            assert (limit.shortage(4) is None) == (threads == 4)
    for size, is_pool in [(1, True), (3, False)]:
        with pytest.raises(ConfigError, match=f"allows {size} connections?. A worker needs at least {size + 1}"):
            Limit(size, "it", is_pool).threads(4)


@pytest.mark.dialect
@on_postgresql
def test_check_doctor_and_worker_say_that_a_pool_is_too_small(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    for value, size in [(True, 4), ({}, None), ({"min_size": 2}, 2), ({"min_size": 2, "max_size": 9}, 9)]:
        with pool(value):
            limit = pool_limit("default")
        assert (limit and limit.size) == size
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert [each.level for each in doctor.connection_limit("default")] == [checks.INFO]
    with pool(True):
        assert Worker().concurrency == 2
        found = [message for message in checks.run_checks() if message.id == "django_delayq.W020"]
        assert [each.level for each in doctor.connection_limit("default")] == [checks.WARNING]
    assert "allows 4 connections, but a worker with 4 handler threads needs 6." in found[0].msg
    assert "allows 4 connections, but a worker with 4 handler threads needs 6." in caplog.text
    assert not [message for message in checks.run_checks() if message.id == "django_delayq.W020"]


@pytest.mark.dialect
@on_postgresql
def test_by_default_processes_open_half_of_the_allowed_connections_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    with connection.cursor() as cursor:  # undone with the test's transaction
        for limit, count in [(100, 4), (56, 4), (55, 3), (28, 2), (20, 1), (5, 1)]:
            cursor.execute(f"CREATE ROLE limited_{limit} LOGIN CONNECTION LIMIT {limit}")
            cursor.execute(f"SET LOCAL SESSION AUTHORIZATION limited_{limit}")
            assert default_count(Worker(concurrency=4)) == count
            cursor.execute("RESET SESSION AUTHORIZATION")


def test_the_processes_of_one_supervisor_share_the_connections_that_the_server_allows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(concurrency=4)
    if pool_limit("default"):
        pytest.skip("a pool is that of one process")
    worker.processes = 2
    worker.limit_concurrency(Limit(14, "it"))
    assert worker.concurrency == 4
    worker.limit_concurrency(Limit(11, "it"))
    assert worker.concurrency == 2
    assert "it, for each of 2 processes, allows 5 connections, but a worker with 4" in caplog.text
