"""Requests that schedule, in real web servers: gunicorn that forks after loading the application, and uvicorn."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine, get_engine
from tests.conftest import ROOT
from tests.support.waiting import wait_until
from tools import processes

if TYPE_CHECKING:
    import redis

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
APPLICATION = "tests.beside.web.application"
COMMANDS = {
    "gunicorn": ["gunicorn", "--preload", "--workers=2", "--bind=unix:{address}", f"{APPLICATION}:wsgi"],
    "uvicorn": ["uvicorn", "--uds={address}", "--lifespan=off", f"{APPLICATION}:asgi"],
}


class WebServer:
    """A web server of the test, which listens on a socket file."""

    def __init__(self, name: str, directory: Path, environment: dict[str, str]) -> None:
        self.address = directory / "socket"
        self._log = directory / "log"
        command = [word.format(address=self.address) for word in COMMANDS[name]]
        with self._log.open("wb") as log:
            self.process = processes.start(
                [sys.executable, "-m", *command],
                env={**environment, "DJANGO_SETTINGS_MODULE": "tests.beside.web.settings"},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def get(self, page: str) -> str | int:
        """Return the content of a page, or the status of an error."""
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(30)
            connected.connect(str(self.address))
            client = http.client.HTTPConnection("testserver")
            client.sock = connected
            client.request("GET", page)
            with client.getresponse() as response:
                content = response.read().decode()
                return content if response.status == 200 else response.status

    def listens(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            return self.get("/due/") == "placed"
        except OSError:
            return False


@pytest.fixture(params=COMMANDS)
def server(request: pytest.FixtureRequest, child_environment: dict[str, str]) -> Iterator[WebServer]:
    connection.close()
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket has at most 107 characters
        started = WebServer(request.param, Path(directory), child_environment)
        wait_until(started.listens, "the web server listens")
        yield started
        processes.stop(started.process)


def test_pages_schedule_commit_or_roll_back_and_a_worker_fires(
    server: WebServer, start_command: Callable[..., subprocess.Popen[bytes]], redis_client: redis.Redis
) -> None:
    assert [server.get("/due/") for _ in range(5)] == ["placed"] * 5
    assert [server.get("/later/") for _ in range(5)] == ["placed"] * 5
    assert server.get("/fail/") == 500
    forget_engine()  # that of an earlier test has the keys of its own database
    engine = get_engine("default")
    assert engine is not None
    assert engine.queue("default", 0).stats().total == 1 + 1 + 5 + 5, "each process reached Redis"
    assert start_command("delayq_worker", "--burst").wait(60) == 0
    assert Counter(Timeout.objects.values_list("state", flat=True)) == {"fired": 1 + 1 + 5, "pending": 5}
