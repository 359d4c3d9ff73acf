"""Turns: of many workers one does the background work. Only to save work; two at once are never wrong."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django_delayq.engine import Engine
from django_delayq.engine.faults import translated

SHARE: Final = 0.9
"""Of an interval: the turn is free again a little before whoever had it comes back, and at once if he never does."""


def take_turn(engine: Engine | None, work: str, interval: timedelta) -> bool:
    """Whether it is the caller's turn to do `work`, which nobody else then gets for most of `interval`.

    Without Redis it is everybody's. Raises EngineUnavailable or EngineError.
    """
    if engine is None:
        return True
    milliseconds = max(1, int(interval.total_seconds() * 1000 * SHARE))
    with translated(engine.client):
        return bool(engine.client.set(f"{engine.prefix}:turn:{work}", 1, nx=True, px=milliseconds))
