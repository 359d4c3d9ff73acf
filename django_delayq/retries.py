"""When a failed handler is retried: lists of delays and exponential backoff. Imports no Django."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

_MINUTE, _HOUR = 60.0, 3600.0
# Two immediate retries for a transient error, then delays in which a person or a partner's system can recover.
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
    """A list of delays between attempts: n delays mean at most n + 1 attempts, after which the timeout is `dead`.

    Args:
        delays: seconds or timedeltas, one per retry. Default: 0, 0, 2 m, 10 m, 10 m, 1 h, 2 h, 6 h, 15 h.
        jitter: each delay is lengthened by a random fraction up to this (0 to 1), so that a thousand timeouts
            that failed together are not retried together. Default 0.

    Raises:
        TypeError, ValueError: a delay that is not a duration, or negative, or longer than a year.
    """

    delays: tuple[float, ...]
    jitter: float

    def __init__(self, delays: Iterable[float | timedelta] = DEFAULT_LADDER, *, jitter: float = 0.0) -> None:
        if not isinstance(delays, Iterable):
            raise TypeError(
                f"Retry() takes a list of delays, such as [60, 600], not {delays!r}. For a number of retries: "
                "Retry.exponential(times=5)."
            )
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
        """Retry `times` times, after `base`, `base * factor`, `base * factor**2`, ... and at most `max` seconds.

        Raises:
            TypeError, ValueError: an argument is out of range. Delays that shrink are a list: `Retry([3600, 1800])`.
        """
        first, ceiling = _seconds(base, "base"), _seconds(max, "max")
        if factor < 1:
            hint = "For delays that shrink, pass a list: Retry([3600, 1800, 600])."
            raise ValueError(f"factor must be at least 1, not {factor!r}. {hint}")
        if isinstance(times, bool) or not isinstance(times, int) or not 0 <= times <= 1000:
            raise ValueError(f"times must be an int from 0 to 1000, not {times!r}.")
        delays, delay = [], first
        for _ in range(times):
            delays.append(min(delay, ceiling))
            delay = min(delay * factor, ceiling)
        return cls(delays, jitter=jitter)

    @classmethod
    def never(cls) -> Retry:
        return cls(())

    def delay_after(self, attempts: int, rng: random.Random | None = None) -> timedelta | None:
        """Return the delay after `attempts` (1 or more) have failed; None if all retries are used up.

        `rng` replaces the random source, for tests that need the same jitter twice.
        """
        if attempts > len(self.delays):
            return None
        step = self.delays[max(attempts, 1) - 1]
        spread = (rng or random).random() * self.jitter
        return timedelta(seconds=step * (1 + spread))
