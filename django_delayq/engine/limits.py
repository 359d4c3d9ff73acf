"""The bounds of the engine, and the refusal of what lies outside them, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

MAX_BATCH: Final = 1000
"""Members that one script may touch: 100,000 in one script stall every client of the server for most of a second."""
MAX_PEEK: Final = 500
MAX_ID: Final = 2**63 - 1
MAX_DUE_MS: Final = 2**42 - 1
"""The year 2109: the time shares an exact double with the lease and the deliveries."""
MAX_LEASE_MS: Final = 24 * 60 * 60 * 1000
"""A lease that ends later than this from now is a forgery or a mended clock, and `ensure` overrides it."""

NO_LEASE: Final = 2**52
"""The token of a lease that ended in 1970, which nobody has."""
MAX_AHEAD_MS: Final = 1000

DUE_UNIT: Final = 1024
"""What one millisecond weighs in a score (`lua/include/score.lua` has the whole layout)."""


def checked_id(id: int) -> str:
    """The id as the member it is in Redis. Raises ValueError outside [1, 2**63), TypeError for what is no int."""
    if not isinstance(id, int) or isinstance(id, bool):
        raise TypeError(f"an entry's id is an int, not {id!r}")
    if not 0 < id <= MAX_ID:
        raise ValueError(f"an entry's id lies in [1, 2**63), not {id}")
    return str(id)


def checked_pair(id: int, due_ms: int) -> tuple[int, str]:
    """Score and member of a waiting entry. Raises ValueError outside [0, 2**42) ms, TypeError for what is no int."""
    if not isinstance(due_ms, int) or isinstance(due_ms, bool):
        raise TypeError(f"a due time is an int of milliseconds since 1970, rounded up by the caller, not {due_ms!r}")
    if not 0 <= due_ms <= MAX_DUE_MS:
        raise ValueError(f"a due time lies in [0, 2**42) milliseconds since 1970, not {due_ms}")
    return due_ms * DUE_UNIT, checked_id(id)


def checked_lease_ms(lease_ms: int) -> int:
    """The lease time unchanged. Raises ValueError outside [1 ms, 24 h]."""
    if not 1 <= lease_ms <= MAX_LEASE_MS:
        raise ValueError(f"a lease lasts from 1 ms to 24 hours, not {lease_ms} ms")
    return int(lease_ms)


def checked_ahead_ms(ahead_ms: int) -> int:
    """The time unchanged. Raises ValueError outside [0, 1 s]: who takes more keeps it from others for nothing."""
    if not 0 <= ahead_ms <= MAX_AHEAD_MS:
        raise ValueError(f"entries are given out at most 1 second ahead of time, not {ahead_ms} ms")
    return int(ahead_ms)


def batches(items: Iterable[T], size: int = MAX_BATCH) -> Iterator[Sequence[T]]:
    """The items in order, in tuples of at most `size`; none for no items."""
    iterator = iter(items)
    while batch := tuple(islice(iterator, size)):
        yield batch
