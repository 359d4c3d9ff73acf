"""The probes of the how-to pages, run as an orchestrator does, against a real worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from django_delayq.models import WorkerSeen
from tests.conftest import ROOT
from tests.docs.test_how_to import file
from tests.support.processes import StartWorker, start_worker
from tests.support.waiting import wait_until
from tools import processes

__all__ = ["start_worker"]

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
CLOSED_PORT = "redis://127.0.0.1:1/0"

Probe = Callable[..., int]


@pytest.fixture
def probe(child_environment: dict[str, str]) -> Probe:
    """Run the probe that the pages show and return its exit code; keywords are environment variables."""
    compose: Any = yaml.safe_load(file("compose", "compose.yaml"))
    kubernetes: Any = yaml.safe_load(file("kubernetes", "timeouts.yaml"))
    command = compose["services"]["timeouts"]["healthcheck"]["test"][1:]
    container = kubernetes["spec"]["template"]["spec"]["containers"][0]
    assert command == container["livenessProbe"]["exec"]["command"] == container["startupProbe"]["exec"]["command"]
    assert command[:2] == ["python", "manage.py"]

    def run(**variables: str) -> int:
        return subprocess.run(
            [sys.executable, "-m", "django", *command[2:]],
            env={**child_environment, **variables}, cwd=ROOT, capture_output=True, check=False,
        ).returncode  # fmt: skip

    return run


def test_a_probe_follows_the_worker_and_neither_redis_nor_the_database(probe: Probe, start_worker: StartWorker) -> None:
    assert probe() == 1, "no worker has started"
    worker = start_worker(REDIS_URL=CLOSED_PORT)
    wait_until(WorkerSeen.objects.exists, "the worker has written its heartbeat")
    assert probe() == 0
    assert probe(DELAYQ_TEST_REDIS_URL=CLOSED_PORT) == 0, "Redis is down"
    assert probe(DELAYQ_TEST_DB_NAME="/missing/database") == 0, "the database is down"
    processes.stop(worker)
    assert worker.returncode == 0
    assert probe() == 1, "the worker has stopped"
