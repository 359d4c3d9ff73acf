"""What a real worker process writes: its first screen and its log, which are those of the page about the worker."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import settings as test_settings
from tests.docs.pages import ROOT, read
from tools import processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(test_settings.DB != "sqlite", reason="the project of the page brings its own SQLite"),
]
SETTINGS = """
SECRET_KEY = "only for this test"
USE_TZ = True
SILENCED_SYSTEM_CHECKS = ["django_delayq.W004", "django_delayq.I001"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.contenttypes", "django_delayq", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}}
"""
MODELS = """
from django.db import models

class Order(models.Model):
    status = models.CharField(max_length=20, default="unpaid")
    created_at = models.DateTimeField(null=True)
"""
TIMEOUTS = """
from datetime import timedelta

from django.db.models import Q
from django_delayq import GiveUp, Retry, timeout_policy
from shop.models import Order


@timeout_policy(Order, after=timedelta(minutes=30), since="created_at", when=Q(status="unpaid"))
def cancel_unpaid(order, timeout):
    order.status = "cancelled"
    order.save()


@timeout_policy(Order, after=timedelta(hours=2), retry=Retry([0]))
def send_reminder(order, timeout):
    if timeout.attempts == 1:
        raise ConnectionError("no answer from sms.example.com")


@timeout_policy(Order)
def ask_for_review(order, timeout):
    raise GiveUp("the customer has no address")
"""
DUE = """
import datetime
from django.utils import timezone
from django_delayq import schedule_timeout
from shop.models import Order

Order.objects.all().delete()
order = Order.objects.create(created_at=timezone.now() - datetime.timedelta(minutes=30))
schedule_timeout(order, "send_reminder", seconds=0)
schedule_timeout(order, "ask_for_review", seconds=0)
"""
FIXED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d|[\d.]+ (?:ms|s)\b|\d+\.\d+(?:\.\w+)*(?:\+\w+)?")
AHEAD = itertools.count(int(time.time()) + 5)
"""Different times of changes, each later than all files."""
Start = Callable[..., Any]


@pytest.fixture
def begin() -> Iterator[Start]:
    """Start a command that is killed, group and all, when the test ends."""
    started: list[Any] = []

    def do(home: Path, *arguments: str, **variables: str) -> Any:
        started.append(start(home, *arguments, **variables))
        return started[-1]

    yield do
    for process in started:
        processes.kill(process)
        process.communicate()


def start(home: Path, *arguments: str, **variables: str) -> Any:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "project", "PYTHONPATH": f"{home}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "django", *arguments]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return processes.start(command, cwd=home, env={**environment, **variables}, text=True, **both)


def manage(home: Path, *arguments: str) -> str:
    process = start(home, *arguments)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    return str(out)


def next_line(process: Any, event: str) -> dict[str, Any]:
    """Return the next JSON line with the event."""
    for text in process.stdout:
        if text.startswith("{") and (line := json.loads(text))["event"] == event:
            return dict(line)
    raise AssertionError(f"no line with the event {event}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a project."""
    home = tmp_path_factory.mktemp("project")
    (home / "shop").mkdir()
    files = {"project.py": SETTINGS, "shop/__init__.py": "", "shop/models.py": MODELS, "shop/timeouts.py": TIMEOUTS}
    for name, code in files.items():
        (home / name).write_text(code)
    manage(home, "migrate", "--run-syncdb", "-v0")
    return home


@pytest.fixture
def shop(home: Path) -> Path:
    """Return the project with three due timeouts and no others."""
    manage(home, "shell", "-v0", "-c", DUE)
    return home


def fixed(text: str) -> list[str]:
    """Return the lines without times, numbers and versions, and without those of a machine that is slow."""
    lines = [line for line in text.splitlines() if "has been running for" not in line]
    return [re.sub(r"object \d+|Timeout \d+", "N", FIXED.sub("T", line)) for line in lines]


def test_the_first_screen_and_the_log_are_those_of_the_page(shop: Path) -> None:
    out = manage(shop, "delayq_worker", "--burst").replace(str(shop), "/srv/shop")
    shown = [block.code for block in read(ROOT / "docs" / "worker.md").blocks if block.language == "text"]
    screen, _blank_line, log = out.partition("\n\n")
    assert fixed(screen) == fixed(shown[0])
    assert sorted(fixed(log)) == sorted(fixed(shown[1])), out


@contextmanager
def changed(file: Path, code: str = "") -> Iterator[None]:
    """Append `code` to the file until the block ends, and touch the file again and again meanwhile.

    The reloader does not notice a change before it has read the files.
    """
    stopped, before = threading.Event(), file.read_text()

    def keep_touching() -> None:
        while not stopped.wait(0.5):
            os.utime(file, (next(AHEAD),) * 2)

    touching = threading.Thread(target=keep_touching, daemon=True)
    file.write_text(before + code)
    touching.start()
    try:
        yield
    finally:
        stopped.set()
        touching.join()
        file.write_text(before)
        os.utime(file, (next(AHEAD),) * 2)


def test_with_autoreload_a_change_starts_the_worker_again_and_code_that_cannot_be_loaded_is_reported(
    shop: Path, begin: Start
) -> None:
    worker, code = begin(shop, "delayq_worker", "--autoreload", "--log-format", "json"), shop / "shop" / "timeouts.py"
    first = next_line(worker, "worker_started")
    next_line(worker, "timeout_dead")
    with changed(code):
        assert next_line(worker, "worker_stopped")["process"] == first["process"], "it releases its timeouts"
    second = next_line(worker, "worker_started")
    with changed(code, "def forgotten("):
        lines = list(itertools.takewhile(lambda line: "starts again when the code changes" not in line, worker.stdout))
        assert any(line.startswith("SyntaxError") for line in lines), lines
    third = next_line(worker, "worker_started")
    assert len({each["process"] for each in (first, second, third)}) == 3
    os.killpg(worker.pid, signal.SIGINT)
    next_line(worker, "worker_stopped")
