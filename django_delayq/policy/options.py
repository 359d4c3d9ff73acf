"""The value objects of a policy: `Retry`, and guard rails, which limit what it may do. Imports no Django."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    from django_delayq.times.spans import Length


def misfit(function: Callable[..., Any], arguments: Sequence[str]) -> str:
    """Return why calling `function` with positional `arguments` would not run it; "" if it would, or may."""
    if isinstance(function, type):
        return f"is a class, {function}, which would only be instantiated; give a function or an instance."
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, called)):
        return "has a `yield`: calling it would only make a generator, and run none of its lines."
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"is called with ({', '.join(arguments)}), but takes {signature}: {error}."
    return ""


Then = Literal["skip", "dead", "fire"]
MAX_PERIOD: Final = timedelta(days=366)
"""Longer waits are deadlines of their own. Sums of many must not be beyond the last year of a datetime."""
MAX_COUNT: Final = 1_000_000
"""Numbers of timeouts beyond it are typing errors; a counter that never reaches its limit would not protect."""
MAX_STORED: Final = 32_000
"""The columns of the ledger for attempts and extensions are small integers."""
_MINUTE, _HOUR = 60.0, 3600.0
# Two immediate retries for a transient error, then delays in which a person or a partner's system can recover.
DEFAULT_LADDER = (0.0, 0.0, 2 * _MINUTE, 10 * _MINUTE, 10 * _MINUTE, _HOUR, 2 * _HOUR, 6 * _HOUR, 15 * _HOUR)


def _seconds(value: float | timedelta, name: str) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be seconds or a timedelta, not {type(value).__name__}.")
    if not 0 <= seconds <= MAX_PERIOD.total_seconds():
        raise ValueError(f"{name} must lie between 0 and {MAX_PERIOD.total_seconds():.0f} seconds, not {seconds!r}.")
    return float(seconds)


@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """A list of delays between attempts: n delays mean at most n + 1 attempts, after which the timeout is `dead`.

    Args:
        delays: seconds or timedeltas, one per retry. Default: 0, 0, 2 m, 10 m, 10 m, 1 h, 2 h, 6 h, 15 h.
        jitter: each delay is lengthened by a random fraction up to this (0 to 1), so that a thousand timeouts
            that failed together are not retried together. Default 0.

    Raises:
        TypeError, ValueError: a delay that is not a duration, or negative, or longer than a year; or more than 32,000
            delays.
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
        object.__setattr__(self, "delays", tuple(_seconds(delay, "A delay of a Retry") for delay in delays))
        object.__setattr__(self, "jitter", float(jitter))
        if len(self.delays) > MAX_STORED:
            raise ValueError(f"A Retry has at most {MAX_STORED} delays, not {len(self.delays)}. Retry less often.")

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
        spread = (rng or random).random() * self.jitter
        return timedelta(seconds=self.delays[attempts - 1] * (1 + spread))


def _check_count(value: Any, name: str, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}.")
    if not least <= value <= MAX_COUNT:
        raise ValueError(f"{name} must lie between {least} and {MAX_COUNT}, not {value}.")


def _check_period(value: Any, name: str, least: timedelta) -> None:
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a timedelta, not {type(value).__name__}.")
    if not least <= value <= MAX_PERIOD:
        raise ValueError(f"{name} must lie between {least} and {MAX_PERIOD.days} days, not {value}.")


def _check_length(value: Any, name: str) -> None:
    """Refuse what is neither a span nor a period."""
    if not callable(getattr(value, "end", None)):
        _check_period(value, name, timedelta(0))


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` attempts begin within any period `per`, over all workers.

    Args:
        count: how many.
        per: the period.
        by: a column of the object, such as `"merchant_id"`, or a path to one over foreign keys: each of its values has
            a rate of its own. The backlog of one value delays no other.

    Raises:
        TypeError, ValueError: `count` is not an int from 1, `per` not a timedelta from 10 ms to a year, or `by` not
            a string.
    """

    count: int
    per: timedelta = timedelta(seconds=1)
    by: str | None = None

    def __post_init__(self) -> None:
        _check_count(self.count, "count")
        _check_period(self.per, "per", timedelta(milliseconds=10))
        if self.by is not None and not isinstance(self.by, str):
            raise TypeError(f'by must be the name of a column, such as "merchant_id", not {self.by!r}.')


@dataclass(frozen=True, slots=True)
class Limits:
    """What the handler of a policy may use, and how far the application may move a deadline.

    Args:
        run: how long one call of the handler may take; then the attempt fails with `TimeLimitExceeded`.
        rate: how many attempts may begin per period; the others are deferred.
        snoozes: how often one timeout may snooze; one more ends in `dead`.
        total: how much later than its first deadline the application may move a timeout, by any function, as a
            timedelta or span; beyond that, it raises `ExtensionLimit`. Operators may move it further.

    Raises:
        TypeError, ValueError: a value of another type or range.
    """

    run: timedelta | None = None
    rate: Rate | None = None
    snoozes: int | None = None
    total: Length | None = None

    def __post_init__(self) -> None:
        if self.run is not None:
            _check_period(self.run, "run", timedelta(milliseconds=50))
        if self.rate is not None and not isinstance(self.rate, Rate):
            raise TypeError(f"rate must be a Rate, such as Rate(20, per=timedelta(seconds=1)), not {self.rate!r}.")
        if self.snoozes is not None:
            _check_count(self.snoozes, "snoozes", 0)
        if self.total is not None:
            _check_length(self.total, "total")


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The function `(obj, timeout)` that is asked before the handler is called, and how many seconds it may take.

    Raises:
        TypeError, ValueError: another type or range, or the function cannot be called like that.
    """

    function: Callable[..., Any]
    timeout: timedelta

    def __post_init__(self) -> None:
        _check_period(self.timeout, "timeout", timedelta(milliseconds=50))
        if not callable(self.function):
            raise TypeError(f"confirm needs a function, not {self.function!r}.")
        if words := misfit(self.function, ("obj", "timeout")):
            raise TypeError(f"The confirm function {words}")

    @property
    def seconds(self) -> float:
        return self.timeout.total_seconds()


@dataclass(frozen=True, slots=True)
class Late:
    """What happens to a timeout whose first attempt would begin later than `after` its deadline.

    Args:
        after: how late is too late: a timedelta or span.
        then: `"skip"`: settle as `skipped`; `"dead"`: keep it for a person; `"fire"`: fire it anyway.

    Raises:
        TypeError, ValueError: a value of another type or range.
    """

    after: Length
    then: Then = "skip"

    def __post_init__(self) -> None:
        _check_length(self.after, "after")
        if self.then not in get_args(Then):
            raise ValueError(f'then must be "skip", "dead" or "fire", not {self.then!r}.')


@dataclass(frozen=True, slots=True)
class Brake:
    """Pause the policy once more than `most` of its timeouts have fired within `per`, over all workers.

    Raises:
        TypeError, ValueError: `most` is not an int from 1, or `per` not a timedelta from a second to a year.
    """

    most: int
    per: timedelta

    def __post_init__(self) -> None:
        _check_count(self.most, "most")
        _check_period(self.per, "per", timedelta(seconds=1))
