"""Run a command with or without a terminal, and capture its output."""

from __future__ import annotations

import io
import os
import pwd
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from django.core.checks import CheckMessage
from django.core.management import call_command
from django.utils import timezone

import django_delayq
from django_delayq import get_policy
from django_delayq.ledger import controls
from django_delayq.models import WorkerSeen
from django_delayq.monitoring.doctor import examine
from tests.support.typed import Patch

CLI = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
REMIND, LINGER, UNPAID = "testapp.order.remind", "testapp.order.linger", "testapp.order.cancel_unpaid"


class Said(NamedTuple):
    out: str
    err: str


Do = Callable[..., Said]
Types = Callable[[str | None], None]


def a_worker(*, stuck: timedelta = timedelta(0), **values: Any) -> WorkerSeen:
    """Create the heartbeat of a worker. No test is so slow that the worker counts as gone."""
    now = timezone.now()
    given: dict[str, Any] = {
        "id": str(WorkerSeen.objects.count()), "host": "shop1", "pid": 7, "concurrency": 4, "uses_redis": True,
        "version": django_delayq.__version__, "started_at": now, "seen_at": now + timedelta(hours=1), **values,
    }  # fmt: skip
    return WorkerSeen.objects.create(**given, passed_at=given["seen_at"] - stuck)


def found(name: str, **options: Any) -> list[CheckMessage]:
    """Return what the doctor finds under this name."""
    return [finding for finding in examine(**options) if finding.id == name]


def worst(name: str) -> tuple[int, str]:
    """Return the level and the words of the first finding of this name."""
    finding = found(name)[0]
    return finding.level, f"{finding.msg} {finding.hint}"


def says(name: str, level: int, *texts: str) -> str:
    """Fail unless the first finding of this name has this level and contains all these words; return them all."""
    found_level, words = worst(name)
    assert found_level == level, words
    assert [text for text in texts if text not in words] == [], words
    return words


def exit_code(*options: str) -> int:
    try:
        call_command("delayq_doctor", *options)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def stop_of(label: str) -> str:
    return controls.policy_state(get_policy(label), "default").stop


@pytest.fixture(autouse=True)
def as_in_a_new_process(controls_are_read_again: None) -> None:
    """Use the fixture for every test of this folder."""


@pytest.fixture
def do() -> Do:
    """`do("delayq_cancel", "--all")` returns the output of the command."""

    def run(*arguments: str) -> Said:
        out, err = io.StringIO(), io.StringIO()
        call_command(*arguments, stdout=out, stderr=err)
        return Said(out.getvalue(), err.getvalue())

    return run


class Terminal(io.StringIO):
    """Answer the prompts of the command. With `None` there is no terminal."""

    def __init__(self, typed: str | None = "") -> None:
        super().__init__(typed or "")
        self._is_there = typed is not None

    def isatty(self) -> bool:
        return self._is_there


@pytest.fixture
def typing(monkeypatch: Patch) -> Types:
    """From now on this is what is typed."""

    def types(typed: str | None) -> None:
        stdin: Any = Terminal(typed)
        monkeypatch.setattr("sys.stdin", stdin)

    types(None)
    return types
