"""The supervisor of several worker processes."""

from __future__ import annotations

import os
import subprocess
import sys

# A library of the project may have threads, and the system may pass a signal for the process to one of them.
SIGNAL_TO_ANOTHER_THREAD = """
import signal, sys, threading, time

import django

django.setup()
from django_delayq.worker.supervisor import Supervisor


class Idle:
    abandoned, is_stuck = 0, False

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


PRINTS = """
import django

django.setup()
from django_delayq.worker.supervisor import Supervisor


class Printing:
    abandoned, is_stuck = 0, False

    def run(self):
        print("of a handler")


Supervisor(2, Printing, ends=True).run()
"""


def test_what_handlers_print_is_not_lost_when_a_process_ends() -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    printed = subprocess.check_output([sys.executable, "-c", PRINTS], timeout=60, env=environment)
    assert printed.splitlines() == [b"of a handler"] * 2


FORK_FAILS = """
import os

import django

django.setup()
from django_delayq.worker.supervisor import Supervisor

errors, fork = [BlockingIOError("too many processes")], os.fork
os.fork = lambda: fork() if not errors else (_ for _ in ()).throw(errors.pop())


class Done:
    abandoned, is_stuck = 0, False

    def run(self):
        print("it has run", flush=True)


Supervisor(1, Done, ends=True).run()
"""


def test_a_process_that_the_system_refuses_is_started_later() -> None:
    ended = subprocess.run([sys.executable, "-c", FORK_FAILS], timeout=60, capture_output=True, check=False, text=True)
    assert (ended.returncode, ended.stdout) == (0, "it has run\n")
    assert "too many processes" in ended.stderr


def test_a_signal_that_another_thread_receives_stops_the_processes() -> None:
    subprocess.run([sys.executable, "-c", SIGNAL_TO_ANOTHER_THREAD], check=True, timeout=60)
