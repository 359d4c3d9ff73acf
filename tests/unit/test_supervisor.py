"""The supervisor of several worker processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SETUP = """
import os, signal, sys, threading, time

import django

django.setup()
from django_delayq.worker.supervisor import Supervisor


class Printing:
    has_failed = gave_up = False

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
# A library of the project may have threads, and the system may pass a signal for the process to one of them.
SIGNAL_TO_ANOTHER_THREAD = """
class Idle:
    has_failed = gave_up = False

    def __init__(self):
        self._stopped = threading.Event()

    def stop(self, hard=False):
        self._stopped.set()

    def run(self):
        self._stopped.wait()


def stop_soon():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(600)


threading.Thread(target=stop_soon, daemon=True).start()
sys.exit(Supervisor(1, Idle).run())
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that exits with 0."""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", SETUP + script]
    return subprocess.run(command, check=True, timeout=60, env=environment, capture_output=True, text=True)


def test_what_handlers_print_is_not_lost_when_a_process_ends() -> None:
    assert run("Supervisor(2, Printing, ends=True).run()").stdout == "of a handler\n" * 2


def test_a_process_that_the_system_refuses_is_started_later() -> None:
    ended = run(FORK_FAILS)
    assert ended.stdout == "of a handler\n"
    assert "too many processes" in ended.stderr


def test_a_signal_that_another_thread_receives_stops_the_processes() -> None:
    run(SIGNAL_TO_ANOTHER_THREAD)


def test_a_process_of_a_burst_that_has_given_up_is_not_started_again() -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        run(GIVES_UP)
    assert (ended.value.returncode, ended.value.stdout) == (1, "of a handler\n" * 2)
