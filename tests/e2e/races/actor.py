"""The processes of a race: each runs the commands that it reads as lines of JSON, and answers each."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import django

from tests.conftest import ROOT
from tools import processes

PATIENCE = 60.0
"""Seconds after which a test that waits for other processes gives up."""


class Actor:
    """A child process that runs `main`: it runs a command at the same time as others, and answers."""

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


def main() -> None:
    django.setup()
    operations = _operations()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": operations[asked.pop("operation")](**asked)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        _say(answer)


def _operations() -> Mapping[str, Callable[..., Any]]:
    from django.db import connections

    from tests.e2e.races import paying, verbs

    return {
        "begin": _begin,
        "end": connections.close_all,  # other tests count the connections to the database
        "pay": paying.pay,
        "schedule": verbs.schedule,
        "anything": verbs.anything,
    }


def _begin(prefix: str) -> None:
    """Begin another test: its keys in Redis have this prefix, and what was cached of the database is outdated."""
    from django.conf import settings
    from django.contrib.contenttypes.models import ContentType
    from django.test.signals import setting_changed

    from django_delayq.ledger.controls import stop_cache

    settings.DELAYQ = {**settings.DELAYQ, "PREFIX": prefix}
    setting_changed.send(main, setting="DELAYQ", value=settings.DELAYQ, enter=True)
    ContentType.objects.clear_cache()  # emptying the database may have created them again, with other ids
    stop_cache.forget()


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
