"""The supervisor of several worker processes."""

from __future__ import annotations

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


def test_a_signal_that_another_thread_receives_stops_the_processes() -> None:
    subprocess.run([sys.executable, "-c", SIGNAL_TO_ANOTHER_THREAD], check=True, timeout=60)
