"""Guard rails of a policy: what it may never do, whatever happens around it. Imports no Django."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, get_args

Then = Literal["skip", "dead", "fire"]
MAX_PERIOD: Final = timedelta(days=366)
MAX_COUNT: Final = 1_000_000


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


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` attempts begin within any period `per`, over all workers.

    Raises:
        TypeError, ValueError: `count` is not an int from 1, or `per` not a timedelta from 10 ms to a year.
    """

    count: int
    per: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        _check_count(self.count, "count")
        _check_period(self.per, "per", timedelta(milliseconds=10))


@dataclass(frozen=True, slots=True)
class Limits:
    """What the handler of a policy may use.

    Args:
        run: how long one call of the handler may take; then the attempt fails with `TimeLimitExceeded`.
        rate: how many attempts may begin per period; the others are deferred.
        snoozes: how often one timeout may snooze; one more ends in `dead`.

    Raises:
        TypeError, ValueError: a value of another type or range.
    """

    run: timedelta | None = None
    rate: Rate | None = None
    snoozes: int | None = None

    def __post_init__(self) -> None:
        if self.run is not None:
            _check_period(self.run, "run", timedelta(milliseconds=50))
        if self.rate is not None and not isinstance(self.rate, Rate):
            raise TypeError(f"rate must be a Rate, such as Rate(20, per=timedelta(seconds=1)), not {self.rate!r}.")
        if self.snoozes is not None:
            _check_count(self.snoozes, "snoozes", 0)


@dataclass(frozen=True, slots=True)
class Late:
    """What happens to a timeout whose first attempt would begin later than `after` its deadline.

    Args:
        after: how late is too late.
        then: `"skip"`: settle as `skipped`; `"dead"`: keep it for a person; `"fire"`: fire it anyway.

    Raises:
        TypeError, ValueError: a value of another type or range.
    """

    after: timedelta
    then: Then = "skip"

    def __post_init__(self) -> None:
        _check_period(self.after, "after", timedelta(0))
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
