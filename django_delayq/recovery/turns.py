"""Turns: of many workers one does the background work. Only to save work; two at once are never wrong.

Nor is a turn ever believed for long: whoever can write to Redis can take every one of them, and without sweeps what
lies beyond the horizon would never come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from django_delayq.engine import Engine
from django_delayq.engine.faults import translated
from django_delayq.exceptions import EngineError

SHARE: Final = 0.9
"""Of an interval: the turn is free again a little before whoever had it comes back, and at once if he never does."""
PATIENCE: Final = 12
"""After so many intervals without one, a worker takes a turn unasked."""

_had_at: WeakKeyDictionary[Engine, dict[str, float]] = WeakKeyDictionary()


def take_turn(engine: Engine | None, work: str, interval: timedelta) -> bool:
    """Whether it is the caller's turn to do `work`, which nobody else then gets for most of `interval`.

    Without Redis it is everybody's. Raises EngineUnavailable or EngineError.
    """
    if engine is None:
        return True
    had_at, now = _had_at.setdefault(engine, {}), monotonic()
    is_due = now - had_at.setdefault(work, now) >= PATIENCE * interval.total_seconds()
    is_ours = _take(engine, _key(engine, work), max(1, int(interval.total_seconds() * 1000 * SHARE)))
    if is_ours or is_due:
        had_at[work] = now
    return is_ours or is_due


@contextmanager
def turn(engine: Engine | None, work: str, interval: timedelta, *, always: bool = False) -> Iterator[bool]:
    """Yield what `take_turn` returns. After an error the turn is free again, so that a retry does not wait for it.

    With `always`, take no turn and yield True. Raises EngineUnavailable or EngineError.
    """
    if always:
        yield True
        return
    is_ours = take_turn(engine, work, interval)
    try:
        yield is_ours
    except Exception:
        if is_ours and engine is not None:
            with suppress(EngineError), translated(engine.client):
                engine.client.set(_key(engine, work), 1, px=1)  # a user that may not delete may do this
        raise


def _key(engine: Engine, work: str) -> str:
    return f"{engine.prefix}:turn:{work}"


def _take(engine: Engine, key: str, milliseconds: int) -> bool:
    with translated(engine.client):
        if engine.client.set(key, 1, nx=True, px=milliseconds):
            return True
        left = int(engine.client.pttl(key))
        if left == -1 or left > milliseconds:  # no turn lasts so long: foreign, or the clock was set back
            return bool(engine.client.set(key, 1, px=milliseconds))
    return False
