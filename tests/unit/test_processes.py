"""A launcher's promise: whichever of its processes is killed, and however, nothing it started lives on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import processes

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")

# A launcher with a child that starts a grandchild in its own session, which no signal to a group reaches.
# Every running process holds the write end of the pipe, so its end of file proves that all have exited.
LAUNCHER = """
import os, sys
from tools import processes

def work():
    print(os.getpid(), flush=True)
    child = processes.start(["sh", "-c", "setsid sleep 600 & echo ready; exec sleep 600"], pass_fds=[int(sys.argv[1])])
    try:
        return child.wait()
    finally:
        processes.stop(child)

sys.exit(processes.supervised(work))
"""


@pytest.fixture
def launcher() -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", LAUNCHER, str(writing)]
    outer = subprocess.Popen(command, cwd=ROOT, pass_fds=[writing], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    os.close(writing)
    with outer, contextlib.closing(os.fdopen(reading)):
        assert outer.stdout is not None
        inner = int(outer.stdout.readline())
        assert outer.stdout.readline() == b"ready\n"
        yield outer, inner, reading
        outer.kill()


def all_have_ended(reading: int) -> bool:
    ready, _, _ = select.select([reading], [], [], 20)
    return bool(ready) and os.read(reading, 1) == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("half", ["outer", "inner"])
def test_a_killed_launcher_leaves_no_process_behind(
    launcher: tuple[subprocess.Popen[bytes], int, int], half: str, number: signal.Signals
) -> None:
    outer, inner, reading = launcher
    os.kill(outer.pid if half == "outer" else inner, number)
    assert all_have_ended(reading)
    killed = number == signal.SIGKILL and half == "outer"
    assert outer.wait() == (-number if killed else 128 + number)


def test_stopping_a_process_stops_its_group_too() -> None:
    reading, writing = os.pipe()
    child = processes.start(
        ["sh", "-c", "sleep 600 & echo; exec sleep 600"], pass_fds=[writing], stdout=subprocess.PIPE
    )
    os.close(writing)
    with contextlib.closing(os.fdopen(reading)), child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.stop(child) == -signal.SIGTERM
        assert all_have_ended(reading)


def test_a_process_deaf_to_sigterm_is_killed_when_patience_ends() -> None:
    child = processes.start(["sh", "-c", "trap '' TERM; echo; while :; do sleep 600; done"], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.stop(child, patience=0.1) == -signal.SIGKILL
