"""Processes that use one database: actors that run commands, and workers that fire."""

from __future__ import annotations

import fcntl
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from django.db import connection

from django_delayq.engine.records import QueueKeys
from django_delayq.redis_clients import key_prefix
from tests.e2e.races.actor import Actor, all_answer
from tests.support.processes import StartLogged
from tests.support.waiting import wait_until


@pytest.fixture
def counted_deadlocks() -> Iterator[None]:
    """No other test that counts deadlocks, or provokes one, runs meanwhile: MariaDB counts those of all databases."""
    server = f"{connection.settings_dict['HOST']}-{connection.settings_dict['PORT']}"
    with Path(tempfile.gettempdir(), f"delayq-deadlocks-{server}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def idle_actors(django_db_setup: None) -> Iterator[dict[str, list[Actor]]]:
    """Hold the processes of earlier tests by their policies: to start one takes longer than most races."""
    idle: dict[str, list[Actor]] = defaultdict(list)
    yield idle
    for actor in (actor for actors in idle.values() for actor in actors):
        actor.kill()


@pytest.fixture
def actors(
    idle_actors: dict[str, list[Actor]], child_environment: dict[str, str], prefix: str
) -> Iterator[Callable[[int], list[Actor]]]:
    """`actors(3)` returns three processes that are ready. Those that are still busy when the test ends are killed."""
    taken: list[Actor] = []
    idle_ones = idle_actors[child_environment.get("DELAYQ_TEST_POLICIES", "")]

    def take(count: int) -> list[Actor]:
        found = [idle_ones.pop() if idle_ones else Actor(child_environment) for _ in range(count)]
        taken.extend(found)
        for actor in found:
            actor.tell("begin", prefix=prefix)
        all_answer(found)
        return found

    yield take
    idle = [actor for actor in taken if not actor.is_busy]
    for actor in taken:
        if actor in idle:
            actor.tell("end")
        else:
            actor.kill()
    all_answer(idle)
    idle_ones.extend(idle)


@pytest.fixture
def two_workers(start_logged: StartLogged, redis_client: redis.Redis) -> Iterator[None]:
    """Two worker processes fire; at the end they are asked to stop, and do."""
    workers = [start_logged(), start_logged()]
    channel = QueueKeys.of(key_prefix("default"), "default", 0, 1).wake

    def both_listen() -> bool:
        ended = [worker.text for worker in workers if worker.process.poll() is not None]
        assert not ended, f"a worker ended by itself: {ended}"
        return dict(redis_client.pubsub_numsub(channel)).get(channel.encode()) == len(workers)

    wait_until(both_listen, "both workers listen")
    yield
    for worker in workers:
        worker.stop()
