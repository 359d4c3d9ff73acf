"""Turns: of many workers one does the background work. They only save work; two workers at once do no harm.

A turn is never trusted for long: an attacker who can write to Redis can take every turn, and without sweeps timeouts
beyond the horizon would never be loaded.
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

TURN_SHARE: Final = 0.9
"""The part of an interval that a turn lasts, so that it is free when its worker comes back."""
MAX_MISSED: Final = 12
"""After so many intervals without a turn a worker does the work in any case."""

_had_at: WeakKeyDictionary[Engine, dict[str, float]] = WeakKeyDictionary()


def try_claim_turn(engine: Engine | None, work: str, interval: timedelta) -> bool:
    """Return whether it is the caller's turn to do `work`, which no other worker gets for most of `interval`.

    Without Redis always. Raises EngineUnavailable or EngineError.
    """
    if engine is None:
        return True
    had_at, now = _had_at.setdefault(engine, {}), monotonic()
    is_overdue = now - had_at.setdefault(work, now) >= MAX_MISSED * interval.total_seconds()
    key, milliseconds = _key(engine, work), max(1, int(interval.total_seconds() * 1000 * TURN_SHARE))
    with translated(engine.client):
        is_ours = bool(engine.client.set(key, 1, nx=True, px=milliseconds))
        if not is_ours:
            left = int(engine.client.pttl(key))
            if left == -1 or left > milliseconds:  # no turn lasts so long: foreign, or the clock was set back
                is_ours = bool(engine.client.set(key, 1, px=milliseconds))
    if is_ours or is_overdue:
        had_at[work] = now
    return is_ours or is_overdue


@contextmanager
def turn(engine: Engine | None, work: str, interval: timedelta, *, always: bool = False) -> Iterator[bool]:
    """Yield what `try_claim_turn` returns. After an error the turn is free again, so that a retry can have it.

    With `always`, claim no turn and yield True. Raises EngineUnavailable or EngineError.
    """
    is_ours = not always and try_claim_turn(engine, work, interval)
    try:
        yield always or is_ours
    except Exception:
        if is_ours and engine is not None:
            with suppress(EngineError), translated(engine.client):
                engine.client.set(_key(engine, work), 1, px=1)  # allowed to a user that may not delete
        raise


def _key(engine: Engine, work: str) -> str:
    return f"{engine.prefix}:turn:{work}"
