"""A worker process on a Redis of the test's choice, and what its ledger and that Redis say afterwards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from django_delayq import schedule_timeout
from django_delayq.engine.records import Change
from django_delayq.exceptions import EngineUnavailable
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine, get_engine
from tests.support.processes import LoggedWorker, StartLogged
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

if TYPE_CHECKING:
    from pytest_django import Settings

LABEL = "testapp.order.remind"
GHOST = 10**12
"""Ids without a row: a worker that reserves them finds no row and acknowledges them."""


class Stage:
    """A project whose `DELAYQ` the test chooses, here and in its worker process."""

    worker: LoggedWorker

    def __init__(self, settings: Settings, start: StartLogged) -> None:
        self._settings = settings
        self._start = start
        self._chosen: dict[str, Any] = {}
        self.rows: list[Timeout] = []

    def choose(self, redis: str, shards: int = 1) -> None:
        """From now on this is the project's Redis."""
        self._chosen = {"REDIS": redis, "SHARDS": shards}
        self._settings.DELAYQ = {**self._settings.DELAYQ, **self._chosen}

    def start_worker(self) -> None:
        """Start a worker process, and wait until it has reserved an entry from Redis."""
        environment = {
            "DJANGO_SETTINGS_MODULE": "tests.e2e.deployments.settings",
            "DELAYQ_TEST_DEPLOYMENT": json.dumps(self._chosen),
            "DELAYQ_TEST_SECONDS": json.dumps({"LEASE": 5.0, "SWEEP_INTERVAL": 1.0}),
        }
        self.worker = self._start(**environment)
        self.await_worker_on_redis()

    def schedule(self, count: int, within: float) -> None:
        """So many more timeouts, due evenly within so many seconds."""
        for i in range(count):
            order = Order.objects.create(status="new")
            self.rows.append(schedule_timeout(order, "remind", seconds=within * (i + 1) / count))

    def await_worker_on_redis(self) -> None:
        """Wait until the worker has removed the entries without a row from every shard in Redis.

        Only a worker that reserves from Redis finds them: one that polls the ledger leaves them there.
        """
        engine = get_engine("default")
        assert engine is not None
        for shard in range(engine.shards):
            ghost = next(id for id in range(GHOST, 2 * GHOST) if engine.shard_of(id) == shard)
            changes = [Change("default", LABEL, ghost, 0)]
            wait_until(lambda: _is_done(lambda: engine.apply(changes)), "Redis takes a ghost")  # noqa: B023
            queue = engine.queue("default", shard)
            wait_until(lambda: _is_done(lambda: _assert_gone(queue, ghost)), f"{shard} has lost its ghost entry")  # noqa: B023

    def await_all_fired_once_and_none_early(self) -> None:
        wait_until(lambda: not Timeout.objects.filter(settled_at=None).exists(), "all is settled")
        assert Counter(Timeout.objects.values_list("state", flat=True)) == {"fired": len(self.rows)}
        effects = list(Effect.objects.all())
        assert Counter(effect.timeout_id for effect in effects) == {row.pk: 1 for row in self.rows}
        due = {row.pk: row.due_at for row in self.rows}
        assert [effect for effect in effects if effect.at < due[effect.timeout_id or 0]] == []

    def end_worker(self) -> list[str]:
        """Stop the worker, which exits with 0; return what it logged of Redis being away and back, in order."""
        return [line for line in self.worker.stop().splitlines() if "Redis is " in line]


def _is_done(act: Callable[[], object]) -> bool:
    try:
        act()
    except EngineUnavailable:
        return False
    return True


def _assert_gone(queue: Any, id: int) -> None:
    if id in dict(queue.peek(500)):
        raise EngineUnavailable("it is still there")


@pytest.fixture
def stage(settings: Settings, start_logged: StartLogged) -> Iterator[Stage]:
    yield Stage(settings, start_logged)
    forget_engine()
