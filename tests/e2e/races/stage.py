"""The processes of a race as their test sees them, and how it waits for them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

PATIENCE = 60.0
"""Seconds after which a test that waits for other processes gives up."""


class Actor:
    """A child process that runs `actor.py`: told something, it does it while others do theirs, and answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, deed: str, **what: Any) -> None:
        """It begins. Answers must be heard before the next time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"deed": deed, **what}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """What it answers, waited for. Raises AssertionError with its traceback if it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"a process of the race ended by itself, with {self._process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]


def all_answer(actors: Sequence[Actor]) -> list[Any]:
    """What each of them answers."""
    return [actor.hear() for actor in actors]
