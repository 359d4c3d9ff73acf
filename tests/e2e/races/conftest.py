"""Processes that use one database: actors that run commands, and workers that fire."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from django_delayq.engine.records import QueueKeys
from tests.conftest import ROOT
from tests.e2e.races.stage import PATIENCE, Actor, all_answer
from tests.support.waiting import wait_until
from tools import processes


@pytest.fixture
def actors(child_environment: dict[str, str]) -> Iterator[Callable[[int], list[Actor]]]:
    """`actors(3)` starts three processes and waits until they are ready; killed when the test ends."""
    started: list[Any] = []

    def start(count: int) -> list[Actor]:
        command = [sys.executable, "-m", "tests.e2e.races.actor"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        new: list[Any] = [processes.start(command, env=child_environment, cwd=ROOT, **pipes) for _ in range(count)]
        started.extend(new)
        found = [Actor(process) for process in new]
        all_answer(found)
        return found

    yield start
    for process in started:
        processes.kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def two_workers(
    start_command: Callable[..., subprocess.Popen[bytes]], redis_client: redis.Redis, prefix: str, tmp_path: Path
) -> Iterator[None]:
    """Two worker processes fire; at the end they are asked to stop, and do."""
    logs = [tmp_path / f"worker{number}.log" for number in (1, 2)]
    workers = []
    for log in logs:
        with log.open("wb") as output:
            workers.append(start_command("delayq_worker", stdout=output, stderr=output))
    channel = QueueKeys.of(prefix, "default", 0, 1).wake

    def both_listen() -> bool:
        ended = [log.read_text() for worker, log in zip(workers, logs, strict=True) if worker.poll() is not None]
        assert not ended, f"a worker ended by itself: {ended}"
        return dict(redis_client.pubsub_numsub(channel)).get(channel.encode()) == len(workers)

    wait_until(both_listen, "both workers listen")
    yield
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    codes = [worker.wait(PATIENCE) for worker in workers]
    assert codes == [0, 0], [log.read_text() for log in logs]
