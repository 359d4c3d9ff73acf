"""While another service refuses connections, everything that an operator reads shows it; afterwards nothing does."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from rest_framework.test import APIClient

from django_delayq import schedule_timeout
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.monitoring import doctor
from tests.e2e.outages.notifying.timeouts import OPTIONS, notify
from tests.settings import REDIS_URL
from tests.support.processes import start_worker as start_worker  # noqa: PLC0414 - a fixture
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.django_db(transaction=True)]
NOTIFY = "testapp.order.notify"
COUNT = 3


@pytest.fixture
def service() -> Iterator[socket.socket]:
    """Yield a port that refuses connections until it listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))  # bound and not listening: the system refuses, and gives it to no other
        yield found


class Operator:
    """The commands and requests of a person who operates the workers."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.client, self._capsys = APIClient(), capsys
        self.client.force_login(User.objects.create_superuser("alice"))

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and the output of a command."""
        self._capsys.readouterr()
        code = 0
        try:
            call_command(*arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, self._capsys.readouterr().out

    def doctor(self, *options: str) -> tuple[int, str]:
        """Return the exit code of the doctor, and the level at which it reports failing timeouts."""
        code, out = self.run("delayq_doctor", "--quick", "--json", *options)
        return code, next((each["level"] for each in json.loads(out) if each["name"] == "failing"), "")

    def failing(self) -> dict[str, int]:
        """Return how many timeouts fail, from each place that has a number of them."""
        status = json.loads(self.run("delayq_status", "--json")[1])
        head, *lines = self.run("delayq_policies")[1].splitlines()
        (line,) = (line for line in lines if line.startswith(NOTIFY))
        get = self.client.get
        return {
            "status": status["failing"]["value"],
            "policies": int(line[head.index("failing") :].split()[0]),
            "list": self.run("delayq_list", "--failing")[1].count("pending, failing"),
            "rest": len(get("/api/timeouts/?failing=true").json()["results"]),
            "rest policies": get(f"/api/policies/{NOTIFY}/").json()["failing"],
            "rest status": get("/api/status/").json()["failing"]["value"],
        }


@pytest.fixture
def log(service: socket.socket, start_worker: Any, declare: Callable[..., Any], tmp_path: Path) -> Path:
    """Start a worker; return the file of its log."""
    declare(Order, notify, **OPTIONS)
    log = tmp_path / "log"
    variables = {"APPS": "tests.e2e.outages.notifying", "SERVICE_PORT": str(service.getsockname()[1])}
    with log.open("wb") as file:
        start_worker("--log-format", "json", stderr=file.fileno(), **variables)
    wait_until(lambda: WorkerSeen.objects.exists(), "the worker runs")
    return log


@pytest.fixture
def operator(settings: Any, capsys: pytest.CaptureFixture[str]) -> Operator:
    settings.ROOT_URLCONF = "tests.integration.rest.urls"
    return Operator(capsys)


@pytest.mark.skipif(not REDIS_URL, reason="the doctor would find that Redis does not answer")
def test_a_service_that_refuses_is_seen_everywhere_and_then_nowhere(
    service: socket.socket, log: Path, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operator.doctor() == (0, ""), operator.run("delayq_doctor")[1]
    rows = [schedule_timeout(Order.objects.create(note=f"A-{n}"), "notify", seconds=0) for n in range(COUNT)]

    wait_until(lambda: all(row.attempts >= 3 for row in Timeout.objects.all()), "each has failed three times")
    assert operator.failing() == dict.fromkeys(operator.failing(), COUNT)
    assert operator.doctor() == (0, "warning")
    assert operator.doctor("--strict")[0] == 1
    # Ten minutes are as long as they have failed by now.
    monkeypatch.setattr(doctor, "ALL_FAIL_ERROR", timedelta(milliseconds=1))
    assert operator.doctor() == (1, "error")
    _, told = operator.run("delayq_doctor", "--quick")
    assert f"No attempt of {NOTIFY} has succeeded" in told and "ConnectionRefusedError" in told
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    failures = [line for line in lines if line["event"] == "timeout_failed"]
    by_attempt = {(line["attempt"], line["level"]) for line in failures if line["attempt"] <= 3}
    assert by_attempt == {(1, "WARNING"), (2, "ERROR"), (3, "ERROR")}
    for number, row in enumerate(rows):
        name = f"(testapp.order.notify, object {row.object_id} (A-{number}))"
        assert any(name in line["message"] and "ConnectionRefusedError" in line["message"] for line in failures)

    service.listen(100)
    wait_until(lambda: not Timeout.objects.exclude(state="fired").exists(), "all have fired")
    assert operator.failing() == dict.fromkeys(operator.failing(), 0)
    assert operator.doctor() == (0, "")
