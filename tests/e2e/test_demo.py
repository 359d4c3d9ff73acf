"""`make demo` as a machine without a terminal sees it, and as a machine that kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import settings as test_settings
from tests.support.waiting import wait_until
from tools import processes

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(test_settings.DB != "sqlite", reason="the demo brings its own SQLite"),
]

StartDemo = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_demo() -> Iterator[StartDemo]:
    """Start the demo without a terminal; its remaining processes end with the test."""
    before = set(processes.descendants())
    # What a shell may have for another project must not matter: its database would be migrated.
    others = {"DATABASE_URL": "nonsense://", "REDIS_URL": "nonsense://", "DJANGO_SETTINGS_MODULE": "no.such.module"}
    clean = {**os.environ, **others, "PYTHONPATH": str(ROOT), "ORDERS": "", "REVIEWS": ""}

    def start(**environment: str) -> subprocess.Popen[str]:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [sys.executable, "example_project/demo.py"]
        return subprocess.Popen(command, cwd=ROOT, env={**clean, **environment}, text=True, **streams)

    yield start
    for pid in set(processes.descendants()) - before:
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_until(demo: subprocess.Popen[str], words: str) -> None:
    assert demo.stdout is not None
    said = []
    for line in demo.stdout:
        said.append(line)
        if words in line:
            return
    pytest.fail("".join(said))


def test_without_a_terminal_it_lives_through_its_orders_and_ends_well(start_demo: StartDemo) -> None:
    demo = start_demo()
    output, _ = demo.communicate()
    assert demo.returncode == 0, output
    assert "Orders and ledger agree." in output


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_demo_leaves_no_process_behind(start_demo: StartDemo, number: signal.Signals) -> None:
    before = set(processes.descendants())
    with start_demo() as demo:
        read_until(demo, "The shop is open")
        started = set(processes.descendants()) - before
        assert len(started) >= 4  # both halves of the launcher, worker, web server
        os.kill(demo.pid, number)
        wait_until(lambda: not any(map(is_alive, started)), "all have ended")


def test_a_file_of_orders_that_is_not_there_is_named(start_demo: StartDemo, tmp_path: Path) -> None:
    missing = tmp_path / "orders.csv"
    demo = start_demo(ORDERS=str(missing))
    output, _ = demo.communicate()
    assert demo.returncode == 1
    assert f"ORDERS={missing}: there is no such file." in output


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--port=8000", 2)])
def test_it_explains_itself_and_starts_nothing(argument: str, code: int) -> None:
    command = [sys.executable, "example_project/demo.py", argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code
    assert done.stderr.startswith("Run `make demo`") and "PORT" in done.stderr
