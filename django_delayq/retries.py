"""When a firing that failed is tried again: ladders and exponential backoff. Pure arithmetic, no Django."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MINUTE, _HOUR = 60.0, 3600.0
# Two quick tries for a passing fault, then steps that give a person or a partner's system time to recover.
DEFAULT_LADDER = (0.0, 0.0, 2 * _MINUTE, 10 * _MINUTE, 10 * _MINUTE, _HOUR, 2 * _HOUR, 6 * _HOUR, 15 * _HOUR)
MAX_DELAY = timedelta(days=366).total_seconds()


def _seconds(value: float | timedelta, name: str) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be seconds or a timedelta, not {type(value).__name__}.")
    if not 0 <= seconds <= MAX_DELAY:
        raise ValueError(f"{name} must lie between 0 and {MAX_DELAY:.0f} seconds, not {seconds!r}.")
    return float(seconds)


@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """A ladder of waiting times: n steps mean at most n + 1 attempts, after which the timeout is `dead`.

    Args:
        delays: seconds or timedeltas, one per retry. Default: 0, 0, 2 m, 10 m, 10 m, 1 h, 2 h, 6 h, 15 h.
        jitter: each wait is lengthened by a random share of itself up to this (0 to 1), so that a
            thousand timeouts that failed together do not come back together. Default 0.

    Raises:
        TypeError, ValueError: a step that is no duration, or negative, or longer than a year.
    """

    delays: tuple[float, ...]
    jitter: float

    def __init__(self, delays: Iterable[float | timedelta] = DEFAULT_LADDER, *, jitter: float = 0.0) -> None:
        if not 0 <= jitter <= 1:
            raise ValueError(f"jitter must lie between 0 and 1, not {jitter!r}.")
        object.__setattr__(self, "delays", tuple(_seconds(delay, "A step of the ladder") for delay in delays))
        object.__setattr__(self, "jitter", float(jitter))

    @classmethod
    def exponential(
        cls,
        *,
        base: float | timedelta = 1,
        factor: float = 2,
        max: float | timedelta = 3600,
        times: int = 10,
        jitter: float = 0.1,
    ) -> Retry:
        """`times` retries that wait `base`, `base * factor`, `base * factor**2`, ... capped at `max` seconds."""
        first, ceiling = _seconds(base, "base"), _seconds(max, "max")
        if factor < 1:
            raise ValueError(f"factor must be at least 1, not {factor!r}.")
        if isinstance(times, bool) or not isinstance(times, int) or not 0 <= times <= 1000:
            raise ValueError(f"times must be an int from 0 to 1000, not {times!r}.")
        delays, delay = [], first
        for _ in range(times):
            delays.append(min(delay, ceiling))
            delay = min(delay * factor, ceiling)
        return cls(delays, jitter=jitter)

    @classmethod
    def never(cls) -> Retry:
        """One attempt only; the first failure is the end."""
        return cls(())

    def delay_after(self, attempts: int, rng: random.Random | None = None) -> timedelta | None:
        """How long to wait after `attempts` (1 or more) have failed; None when the ladder is used up.

        `rng` replaces the module's random source, for tests that need the same jitter twice.
        """
        if attempts > len(self.delays):
            return None
        step = self.delays[max(attempts, 1) - 1]
        spread = (rng or random).random() * self.jitter
        return timedelta(seconds=step * (1 + spread))
