"""The example shop as a real site: its own database, its own processes, used from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.support.waiting import wait_until
from tools import processes
from tools.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "example_project"), os.environ.get("PYTHONPATH", "")])
AN_HOUR = 3600.0
DELAYS = ("cancel_unpaid", "cancel_unaccepted", "review_by_default", "notify_trial_expiry", "promised_delivery")
DATABASE = os.environ.get("DELAYQ_TEST_DB", "sqlite")
on_sqlite = pytest.mark.skipif(DATABASE != "sqlite", reason="it is the same on each database, and tried on SQLite")


class Shop:
    """One installation of the shop. Commands, workers and the web server are processes of their own."""

    def __init__(self, directory: Path, database_url: str, **environment: str) -> None:
        self.directory = directory
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SHOP_", "REDIS_URL"))},
            "PYTHONPATH": PYTHONPATH,
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "default",
            "DJANGO_SETTINGS_MODULE": "config.settings",
            "DATABASE_URL": database_url,
            **environment,
        }
        self.url = ""
        self._running: list[subprocess.Popen[bytes]] = []

    def manage(self, *arguments: str, fails: bool = False) -> str:
        """Run `manage.py` to its end; gives its stdout, or its stderr if it is meant to fail."""
        done = subprocess.run(
            self._command(*arguments), env=self.environment, capture_output=True, text=True, check=False
        )
        assert bool(done.returncode) == fails, (
            f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        return done.stderr if fails else done.stdout

    def counts(self, *arguments: str) -> dict[str, dict[str, int]]:
        """Run a command whose last line is JSON, and return its value."""
        result: dict[str, dict[str, int]] = json.loads(self.manage(*arguments).splitlines()[-1])
        return result

    def wait_at_most(self, **delays: float) -> None:
        """Set the delays, in seconds, for processes that start from now on; an hour for each that is not named."""
        self.environment["SHOP_DELAYS"] = json.dumps(dict.fromkeys(DELAYS, AN_HOUR) | delays)

    def start_worker(self) -> None:
        self.start("delayq_worker", "--processes", "1")

    def start_server(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.start("runserver", "--noreload", f"127.0.0.1:{port}")
        wait_until(lambda: _answers(self.url), "the server answers")

    def ask(self, expression: str, setup: str = "") -> Any:
        """Return the value (as JSON) of a Python expression in the shop, after the statements of `setup`."""
        code = "import json\nfrom shop.models import *\nfrom django_delayq.models import Timeout\n"
        output = self.manage("shell", "--no-imports", "-c", f"{code}{setup}\nprint(json.dumps({expression}))")
        return json.loads(output.splitlines()[-1])

    def stop(self) -> None:
        for process in self._running:
            processes.stop(process, first=signal.SIGTERM)

    def log(self) -> str:
        """Return the output of the processes."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("*.log")))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `manage.py` as a process that ends with the test; its output goes to the log."""
        with (self.directory / f"{len(self._running)}-{arguments[0]}.log").open("wb") as log:
            process = processes.start(self._command(*arguments), env=self.environment, stdout=log, stderr=log)
        self._running.append(process)
        return process

    @staticmethod
    def _command(*arguments: str) -> list[str]:
        return [sys.executable, str(ROOT / "example_project" / "manage.py"), *arguments]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=30).close()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


@pytest.fixture(scope="module")
def shop_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a new, migrated database on the server that `DELAYQ_TEST_DB` names."""
    with _fresh_database(tmp_path_factory.mktemp("shop-database")) as url:
        Shop(Path(), url).manage("migrate", "--verbosity", "0")
        yield url


@pytest.fixture
def shop(shop_database: str, tmp_path: Path) -> Iterator[Shop]:
    """Yield a shop in that database with the data of earlier tests; its processes end with the test."""
    with _opened(tmp_path, shop_database) as one:
        yield one


@pytest.fixture(scope="module")
def calm_shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Yield a shop with a web server and no worker, where nothing is due within an hour. Tests share it."""
    directory = tmp_path_factory.mktemp("calm-shop")
    with _fresh_database(directory) as url, _opened(directory, url) as one:
        one.manage("migrate", "--verbosity", "0")
        one.wait_at_most()
        one.start_server()
        yield one


@contextlib.contextmanager
def _opened(directory: Path, database_url: str) -> Iterator[Shop]:
    environment = {"REDIS_URL": url} if (url := os.environ.get("DELAYQ_TEST_REDIS_URL")) else {}
    shop = Shop(directory, database_url, SHOP_REDIS_PREFIX=f"shop-{uuid.uuid4().hex}", **environment)
    try:
        yield shop
    finally:
        shop.stop()


@contextlib.contextmanager
def _fresh_database(directory: Path) -> Iterator[str]:
    if DATABASE == "sqlite":
        yield f"sqlite:///{directory / 'shop.sqlite3'}"
        return
    address = os.environ.get(f"DELAYQ_TEST_{DATABASE.upper()}_URL")
    if not address:
        pytest.fail(f"DELAYQ_TEST_DB={DATABASE} needs its server: python3 tests/servers.py run -- ...")
    name = f"shop_{uuid.uuid4().hex[:12]}"
    _execute(address, f"CREATE DATABASE {name}")
    try:
        yield urlunsplit(urlsplit(address)._replace(path=f"/{name}"))
    finally:
        _execute(address, f"DROP DATABASE {name}")


def _execute(address: str, statement: str) -> None:
    """Run one statement, through Django's own connection of the tests' settings."""
    script = "import sys; from django.db import connection as c; c.ensure_connection(); c.cursor().execute(sys.argv[1])"
    environment = {**os.environ, "DATABASE_URL": address, "DJANGO_SETTINGS_MODULE": "config.settings"}
    environment["PYTHONPATH"] = PYTHONPATH
    setup = "import django; django.setup(); "
    subprocess.run([sys.executable, "-c", setup + script, statement], env=environment, check=True)
