"""Processes whose clock is wrong, and is set while they run."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

from tools.moved_clock import OFFSET

SOURCE = Path(__file__).with_name("shifted_clock.c")


class ShiftedClock:
    """A clock for other processes: `environment` is what they are to be started with."""

    def __init__(self, ahead: timedelta = timedelta(0)) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="delayq-clock-")
        self._file = Path(self._folder.name, "ahead")
        self.environment = {"LD_PRELOAD": str(library()), "SHIFTED_CLOCK": str(self._file)}
        self._file.write_bytes(bytes(8))
        self.set(ahead)

    def set(self, ahead: timedelta) -> None:
        """From now on it is so far ahead of the one of this process; negative: behind."""
        ahead += timedelta(seconds=int(os.environ.get(OFFSET, "0")))  # on another day, whose library this one replaces
        with self._file.open("r+b", buffering=0) as file:  # in place: the processes read this page
            file.write(struct.pack("=q", ahead // timedelta(microseconds=1)))

    def close(self) -> None:
        self._folder.cleanup()


@functools.cache
def library() -> Path:
    """Return the library to preload, compiled once. Without a compiler, skip the test; fail it with `CI=true`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.uname().sysname != "Linux":
        words = "clocks are shifted with a C compiler, on Linux"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    made = Path(tempfile.mkdtemp(prefix="delayq-clock-")) / "shifted_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, SOURCE], check=True)
    return made
