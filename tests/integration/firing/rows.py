"""What became of timeouts: their rows, lines in the log, signals, and what their handlers have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.dispatch import Signal

from django_delayq.models import Timeout
from tests.integration.firing.conftest import state
from tests.testapp.models import Effect

FIRED, PENDING, UNMET = ("fired", "due"), ("pending", ""), ("skipped", "condition")
UNTRIED = (PENDING, 0)
"""What `tried` returns of a row for which no attempt was counted."""


def written() -> list[str]:
    """Return of which objects `write` has written, in the order of their keys."""
    return sorted(Effect.objects.values_list("object_id", flat=True), key=int)


def tried(row: Timeout) -> tuple[tuple[str, str], int]:
    """Return the state and cause of `row` in the ledger, and how many attempts were counted."""
    return state(row), row.attempts


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    """Return the records of this event."""
    return [record for record in caplog.records if vars(record).get("event") == event]


@contextmanager
def receiving(receiver: Callable[..., Any], *signals: Signal) -> Iterator[None]:
    """Let `receiver` receive these signals."""
    for signal in signals:
        signal.connect(receiver)
    try:
        yield
    finally:
        for signal in signals:
            signal.disconnect(receiver)


@contextmanager
def hearing(*signals: Signal) -> Iterator[list[tuple[Signal, int]]]:
    """Record which of these signals is sent for which timeout."""
    heard: list[tuple[Signal, int]] = []

    def hear(signal: Signal, timeout: Timeout, **_: Any) -> None:
        heard.append((signal, timeout.pk))

    with receiving(hear, *signals):
        yield heard
