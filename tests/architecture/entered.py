"""Measure which files of the package an operation enters, and how many Python functions it calls, by running it.

The operation runs several times. Only files that each run enters count, so neither a first call nor what a worker does
occasionally changes the result.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import django_delayq
from django_delayq.worker.background import PeriodicThread

RUNS = 3
FOLDER = str(Path(django_delayq.__file__).parent) + os.sep


class Recorder:
    """Note the files of the package that threads with the profile `note` enter."""

    def __init__(self) -> None:
        self._files = set[str]()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Leave out the threads that run whether or not a timeout fires."""
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(FOLDER) and not isinstance(threading.current_thread(), PeriodicThread):
            self._files.add(name.removeprefix(FOLDER))

    def entered_each_time(self, act: Callable[[], object]) -> list[str]:
        act()  # imports, caches and connections
        runs = []
        for _ in range(RUNS):
            self._files = files = set[str]()
            act()
            self._files = set()
            runs.append(files)
        return sorted(set.intersection(*runs))


def files_of_call(act: Callable[[], object]) -> list[str]:
    """Return the files that `act` enters in this thread."""
    recorder = Recorder()

    def run() -> None:
        sys.setprofile(recorder.note)
        try:
            act()
        finally:
            sys.setprofile(None)

    return recorder.entered_each_time(run)


def calls_of(act: Callable[[], object]) -> int:
    """Return how many Python functions `act` calls in this thread at least, also of Django and of the driver."""

    def run() -> int:
        events = list[str]()
        sys.setprofile(lambda _frame, event, _: events.append(event))
        try:
            act()
        finally:
            sys.setprofile(None)
        return events.count("call")

    run()  # imports, caches and connections
    return min(run() for _ in range(RUNS))


def files_of_worker(start: Callable[[], object], fire_one: Callable[[], object]) -> list[str]:
    """Return the files that a worker enters for one timeout, in its main loop and in the thread of the handler.

    Args:
        start: starts the worker in another thread.
        fire_one: returns when the worker has fired and acknowledged one more timeout. What the thread of the caller
            does for that is not recorded.
    """
    recorder = Recorder()
    threading.setprofile(recorder.note)
    try:
        start()
        return recorder.entered_each_time(fire_one)
    finally:
        threading.setprofile(None)
