"""Measure which files of the package an operation enters, and how many Python functions it calls, by running it.

The operation runs several times. Only files that each run enters count, so neither a first call nor what a worker does
occasionally changes the result.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import django_delayq
from django_delayq.worker.background import PeriodicThread

RUNS = 3
FOLDER = str(Path(django_delayq.__file__).parent) + os.sep


class Recorder:
    """Note the files of the package whose functions are called, in the threads that it follows."""

    def __init__(self) -> None:
        self._files: set[str] | None = None

    @contextmanager
    def following_new_threads(self) -> Iterator[None]:
        """Follow all threads that start during the block, but those that run whether or not a timeout fires."""
        threading.setprofile(self._note)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def following_this_thread(self) -> Iterator[None]:
        """Follow the thread of the block."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[set[str]]:
        """Yield the set of the files that the followed threads enter during the block."""
        files: set[str] = set()
        self._files = files
        try:
            yield files
        finally:
            self._files = None

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        files, name = self._files, frame.f_code.co_filename
        if event != "call" or files is None or not name.startswith(FOLDER):
            return
        if not isinstance(threading.current_thread(), PeriodicThread):
            files.add(name.removeprefix(FOLDER))


def files_of_call(act: Callable[[], object]) -> list[str]:
    """Return the files that `act` enters in this thread."""
    recorder = Recorder()

    def run() -> set[str]:
        with recorder.recording() as files, recorder.following_this_thread():
            act()
        return files

    return _entered_each_time(run)


def calls_of(act: Callable[[], object]) -> int:
    """Return how many Python functions `act` calls in this thread at least, also of Django and of the driver."""

    def run() -> int:
        calls = 0

        def note(_frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(note)
        try:
            act()
        finally:
            sys.setprofile(None)
        return calls

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

    def run() -> set[str]:
        with recorder.recording() as files:
            fire_one()
        return files

    with recorder.following_new_threads():
        start()
        return _entered_each_time(run)


def _entered_each_time(run: Callable[[], set[str]]) -> list[str]:
    run()  # imports, caches and connections
    return sorted(set.intersection(*[run() for _ in range(RUNS)]))
