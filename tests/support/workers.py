"""Workers in threads of the test's process, and ways to wait for what they do."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections

from django_delayq import TimeoutPolicy, schedule_timeout
from django_delayq.engine.engine import DelayQueue, Engine
from django_delayq.models import Timeout
from django_delayq.redis_clients import get_engine, get_worker_engine
from django_delayq.worker import Worker
from tests.testapp.models import Order

State = Timeout.State
Declare = Callable[..., TimeoutPolicy[Any]]
needs_more_connections = pytest.mark.skipif(
    os.environ.get("DELAYQ_TEST_POOL") == "2",
    reason="a pool of 2 has connections for one worker in the process, with one handler thread",
)


def _what_threads_do() -> str:
    """Return the stack of each thread, without which a worker that hangs explains nothing."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {number: traceback.format_stack(frame) for number, frame in sys._current_frames().items()}
    return "\n".join(f"{names.get(number)}:\n{''.join(lines[-8:])}" for number, lines in stacks.items())


class RunningWorker:
    """A worker in a thread; `stop` waits for its end, and hands on what it raised."""

    def __init__(self, **options: Any) -> None:
        self.worker = Worker(**options)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker-under-test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error
        finally:
            connections.close_all()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float = 60.0) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the worker did not end:\n{_what_threads_do()}"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.worker.stop()
        self.join()


StartWorker = Callable[..., RunningWorker]


@contextmanager
def worker_engine() -> Iterator[Engine]:
    """An engine as each worker has one of its own."""
    engine = get_worker_engine("default")
    assert engine is not None
    yield engine
    engine.close()


def queue_in_redis() -> DelayQueue:
    """The default queue, as the verbs reach it."""
    engine = get_engine("default")
    assert engine is not None
    return engine.queue("default", 0)


def due_orders(policy: Any, count: int = 1, **delay: Any) -> list[Timeout]:
    """So many new orders, each with a timeout of `policy`; due now unless a delay is given."""
    delay = delay or {"after": timedelta(0)}
    return [schedule_timeout(Order.objects.create(status="new"), policy, **delay) for _ in range(count)]


def states() -> dict[str, int]:
    """How many rows are in which state."""
    found: dict[str, int] = {}
    for state in Timeout.objects.values_list("state", flat=True):
        found[state] = found.get(state, 0) + 1
    return found


def states_in_order() -> list[str]:
    """The states of all rows, the oldest first."""
    return list(Timeout.objects.order_by("id").values_list("state", flat=True))


def all_are(state: str) -> Callable[[], bool]:
    """A condition: every row is in this state."""
    return lambda: not Timeout.objects.exclude(state=state).exists()


ENDS = frozenset({"redis_back", "redis_has_room", "database_back", "pass_succeeded"})
"""Logged at INFO."""


def events(caplog: pytest.LogCaptureFixture, logger: str = "django_delayq.worker") -> list[str]:
    """What this logger warned of, and what is over. The size of the pool, with which a test may be run, is left out."""
    found = [(record, str(vars(record).get("event", ""))) for record in caplog.records if record.name == logger]
    shown = [event for record, event in found if record.levelno >= logging.WARNING or event in ENDS]
    return [event for event in shown if event != "too_few_connections"]


def cut_all_other_connections() -> None:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "  # PgBouncer can notice it from then on
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()")
        for (number,) in cursor.fetchall():
            cursor.execute(f"KILL {number}")
