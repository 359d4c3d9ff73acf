"""What the engine hands out: frozen, small, and free of Redis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One leased id, and how many deliveries of it nobody has answered for, this one included (1 to 15).

    2 or more means that a process died, or lost its lease, while it held the entry.
    """

    id: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to acknowledge, release and extend what one `reserve` returned. Opaque outside the engine."""

    token: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """The answer of one `reserve`.

    `next_due_ms` is when the queue next has work (a due time, or the expiry of a lease), at or before `now_ms` if
    more is due already, and None if the queue is empty. Both times are the server's, so their difference is the
    time to wait whatever the worker's clock says. `lease` is None if and only if `entries` is empty.
    """

    lease: Lease | None
    entries: tuple[Entry, ...]
    next_due_ms: int | None
    now_ms: int
    discarded: int


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Counts at one moment: `due` is what `reserve` would return now, `leased` what is under a live lease."""

    total: int
    leased: int
    due: int
    next_due_ms: int | None
    now_ms: int


@dataclass(frozen=True, slots=True)
class Change:
    """One wish for `Engine.apply`.

    `due_ms` None removes the entry. `earlier_only` adds it, or moves a waiting one earlier (`ensure`); otherwise the
    due time is set unconditionally, and a lease on the entry is broken (`reschedule`).
    """

    queue: str
    id: int
    due_ms: int | None
    earlier_only: bool = False
