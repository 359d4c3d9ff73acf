"""The processes of a race as their test sees them, and how it waits for them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

PATIENCE = 60.0
"""Seconds after which a test that waits for other processes gives up."""


class Actor:
    """A child process that runs `actor.py`: it runs a command at the same time as others, and answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, operation: str, **what: Any) -> None:
        """Start a command. Read its answer before the next one."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"operation": operation, **what}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Wait for the answer and return it. Raises AssertionError with its traceback if it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"a process of the race ended by itself, with {self._process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]


def all_answer(actors: Sequence[Actor]) -> list[Any]:
    """Return the answers of all."""
    return [actor.hear() for actor in actors]
