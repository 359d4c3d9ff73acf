"""A worker that sends messages, the processes of a task queue that receive them, and a broker of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.conftest import ROOT
from tests.engine.redis_process import RedisProcess
from tests.settings import DB
from tools import processes

ENGINES = ["celery", "rq", "tasks"] if DB == "postgresql" else ["celery"]
SEND = """
import django
from django.utils.module_loading import import_string
django.setup()
executor = import_string("{executor}")("default", 1)
for message in {messages}:
    executor.send(message)
executor.close()
"""
SECONDS = {"LEASE": 30.0, "SWEEP_INTERVAL": 1.0}

TABLE = "django_tasks_database_dbtaskresult"


@dataclass(frozen=True)
class Engine:
    """A task queue whose messages wait in the list `key` of a Redis server."""

    broker: RedisProcess
    executor: str = "django_delayq.contrib.celery.CeleryExecutor"
    key: str = "celery"
    command: tuple[str, ...] = (
        "celery", "-A", "tests.e2e.executors.celery_app", "worker", "-c", "2", "-l", "WARNING",
        "--without-gossip", "--without-mingle", "--without-heartbeat",
    )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return {
            "DJANGO_SETTINGS_MODULE": "tests.e2e.executors.settings",
            "DELAYQ_TEST_EXECUTOR": self.executor,
            "DELAYQ_TEST_BROKER": self.broker.url,
        }

    def waiting(self) -> int:
        """Return how many messages no process has received."""
        with self.broker.client() as client:
            return int(client.llen(self.key))

    def lose(self) -> None:
        """Delete the messages that no process has received."""
        with self.broker.client() as client:
            client.delete(self.key)


def make(name: str, broker: RedisProcess) -> Engine:
    if name == "celery":
        return Engine(broker)
    if name == "rq":
        command = ("rq.cli", "worker", "-S", "json", "-c", "tests.e2e.executors.rq_config", "delayq")
        return Engine(broker, "tests.e2e.executors.own_queue.Executor", "rq:queue:delayq", command)
    polling = ("django", "db_worker", "--interval", "0.05", "--no-startup-delay")
    return Engine(broker, "django_delayq.contrib.django_tasks.TaskExecutor", "", polling)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, child_environment: dict[str, str]) -> Iterator[Engine]:
    """Run the test once with each task queue; on other databases than PostgreSQL with Celery only, to save time."""
    with RedisProcess() as broker:
        engine = make(request.param, broker)
        child_environment |= {**engine.environment, "DELAYQ_TEST_SECONDS": json.dumps(SECONDS)}
        if request.param == "tasks":
            _make_table(child_environment)
        yield engine


@pytest.fixture
def short_lease(engine: Engine, child_environment: dict[str, str]) -> None:
    """Have what is lost sent again after two seconds."""
    child_environment["DELAYQ_TEST_SECONDS"] = json.dumps({**SECONDS, "LEASE": 2.0})


def _make_table(environment: dict[str, str]) -> None:
    """Make the table of django-tasks, which the settings of other tests do not know, in the database of the test."""
    if TABLE not in connection.introspection.table_names():
        command = [sys.executable, "-m", "django", "migrate", "-v", "0", "django_tasks_database"]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE}")


@pytest.fixture
def start_worker(
    engine: Engine, start_command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> Callable[..., subprocess.Popen[bytes]]:
    """Start `delayq_worker` with the executor of the engine. Its log is `worker.log`."""

    def start(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "worker.log").open("ab") as log:
            return start_command("delayq_worker", *arguments, env=_prefixed(variables), stderr=log)

    return start


@pytest.fixture
def start_remote(engine: Engine, child_environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the processes of the engine, which receive messages. Killed with all their children when the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *engine.command]
        started.append(processes.start(command, env={**child_environment, **_prefixed(variables)}, cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        processes.kill(process)


@pytest.fixture
def send(engine: Engine, child_environment: dict[str, str]) -> Callable[[list[Any]], None]:
    """Send messages to the queue, as any process with access to it can."""

    def do(messages: list[Any]) -> None:
        code = SEND.format(executor=engine.executor, messages=messages)
        subprocess.run([sys.executable, "-c", code], env=child_environment, cwd=ROOT, check=True)

    return do


def _prefixed(variables: dict[str, str]) -> dict[str, str]:
    return {f"DELAYQ_TEST_{name}": value for name, value in variables.items()}
