"""The processes of a race as their test sees them, and how it waits for them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conftest import ROOT
from tools import processes

PATIENCE = 60.0
"""Seconds after which a test that waits for other processes gives up."""


class Actor:
    """A child process that runs `actor.py`: it runs a command at the same time as others, and answers."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.e2e.races.actor"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = processes.start(command, env=environment, cwd=ROOT, **pipes)
        self.is_busy = False

    def tell(self, operation: str, **what: Any) -> None:
        """Start a command. Read its answer before the next one."""
        self.is_busy = True
        self._process.stdin.write(json.dumps({"operation": operation, **what}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Wait for the answer and return it. Raises AssertionError with its traceback if it failed."""
        line = self._process.stdout.readline()
        assert line, f"a process of the race ended by itself, with {self._process.wait()}"
        self.is_busy = False
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def kill(self) -> None:
        processes.kill(self._process)
        self._process.stdin.close()
        self._process.stdout.close()


def all_answer(actors: Sequence[Actor]) -> list[Any]:
    """Return the answers of all."""
    return [actor.hear() for actor in actors]
