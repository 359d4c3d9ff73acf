"""The supervisor of several worker processes, and how many it starts by default."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from django_delayq.worker import supervisor

SETUP = """
import os, signal, sys, threading, time

import django

django.setup()
from django_delayq.worker.supervisor import Supervisor


class Printing:
    has_failed = gave_up = False
    counts = {"fired": 2}

    def run(self):
        print("of a handler")
"""
FORK_FAILS = """
errors, fork = [BlockingIOError("too many processes")], os.fork
os.fork = lambda: fork() if not errors else (_ for _ in ()).throw(errors.pop())
sys.exit(Supervisor(1, Printing, ends=True).run())
"""
GIVES_UP = """
class GivesUp(Printing):
    has_failed = gave_up = True


sys.exit(Supervisor(2, GivesUp, ends=True).run())
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that exits with 0."""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", SETUP + script]
    return subprocess.run(command, check=True, timeout=60, env=environment, capture_output=True, text=True)


def test_what_handlers_print_is_not_lost_when_a_process_ends_and_one_summary_adds_up_what_all_have_done() -> None:
    ended = run("import logging; logging.basicConfig(level='INFO'); Supervisor(2, Printing, ends=True).run()")
    assert ended.stdout == "of a handler\n" * 2
    logged = ended.stderr.splitlines()
    assert [line.rpartition(": ")[2] for line in logged if "has stopped" in line] == ["4 fired"]


def test_a_process_that_the_system_refuses_is_started_later() -> None:
    ended = run(FORK_FAILS)
    assert ended.stdout == "of a handler\n"
    assert "too many processes" in ended.stderr


def test_a_process_of_a_burst_that_has_given_up_is_not_started_again() -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        run(GIVES_UP)
    assert (ended.value.returncode, ended.value.stdout) == (1, "of a handler\n" * 2)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="of Linux")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 6),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu.max": "max 100000", "system.slice/shop.service/cpu.max": "300000 100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 6),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "25000"}, 2),
    ],
)
def test_the_quota_of_a_container_or_service_limits_the_cores(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"proc/self/cgroup": "0::/system.slice/shop.service\n"}.items() | {
        (f"sys/fs/cgroup/{name}", text) for name, text in files.items()
    }:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert supervisor._cores(tmp_path) == cores
