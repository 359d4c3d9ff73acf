"""Handlers, how their policies are declared, and what happens while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from django_delayq import TimeoutPolicy
from django_delayq.firing.handler import set_checkpoint_hook
from tests.testapp.models import Effect

Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
WAIT = 60
"""Seconds after which a test that waits for another thread gives up."""
LIMITED_MODES = pytest.mark.parametrize("mode", ["alone", "outside", "batch"])
ATOMIC_OR_NOT = pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])

Declare = Callable[..., TimeoutPolicy[Any]]
Handler = Callable[..., Any]


def raising(*errors: BaseException | None) -> Handler:
    """Return a handler that raises these in turn, and then the last one again and again. None: it returns."""
    left = list(errors)

    def handler(*_: Any) -> None:
        if (error := left.pop(0) if len(left) > 1 else left[0]) is not None:
            raise error

    return handler


def both(first: Callable[..., object], second: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls these, one after the other."""

    def act(*given: Any) -> None:
        first(*given)
        second(*given)

    return act


def write(target: Any, timeouts: Any) -> None:
    """Store that this handler was called, for each timeout."""
    for row in timeouts if isinstance(timeouts, list) else [timeouts]:
        Effect.objects.create(what="done", object_id=row.object_id, timeout_id=row.pk)


def write_and_raise(*errors: BaseException | None) -> Handler:
    """Return a handler that writes, and then raises as `raising`."""
    return both(write, raising(*errors))


def execute(sql: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def once_at(step: str, act: Callable[[], object]) -> None:
    """Call `act` when a firing comes to this step for the first time."""
    left = [act]

    def look(reached: str) -> None:
        if reached == step and left:
            left.pop()()

    set_checkpoint_hook(look)
