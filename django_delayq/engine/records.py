"""Every key in Redis, and the values of the engine with their bounds, which are checked before anything is sent.

    delayq:{queue.shard}:z   sorted set   all entries of one queue and shard: id -> score (lua/include/score.lua)
    delayq:{queue.shard}:n   string       0 to 63, distinguishes leases that end in one millisecond
    delayq:{queue.shard}:w   channel      the earliest due time in ms, published whenever it moves forward
    delayq:count:<name>      string       a counter of the last minutes or hours, such as that of a brake; expires
    ...:foreign:<ms>         any          a key of another type under one of these names, renamed
    delayq:installation      string       the name of the installation whose workers use this prefix
    delayq:turn:<work>       string       whose turn a background pass is: `_turn_key` in worker/sweep.py; expires

The braces are Redis Cluster's hash tag: all keys of one shard share a slot, because one script needs both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote


class QueueKeys(NamedTuple):
    """The keys of one queue and shard, and its channel."""

    entries: str
    counter: str
    wake: str

    def aside(self, ms: int) -> tuple[str, str, str, str]:
        """Return both keys, and the names to rename foreign keys to; `ms` is only a label."""
        return (self.entries, self.counter, f"{self.entries}:foreign:{ms}", f"{self.counter}:foreign:{ms}")


def queue_keys(prefix: str, queue: str, shard: int, shards: int) -> QueueKeys:
    """Return the keys of one shard of a queue. Raises ValueError unless 0 <= shard < shards.

    Prefix and queue name are any strings. Characters of a hash tag are quoted reversibly, so that two names never
    share a key.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} is not one of {shards}")
    tag = _shard_tag(_quoted(queue, safe=""), shard, shards)
    base = f"{_quoted(prefix, safe=':')}:{{{tag}}}"
    return QueueKeys(entries=f"{base}:z", counter=f"{base}:n", wake=f"{base}:w")


def counter_key(prefix: str, name: str) -> str:
    """Return the key of the counter `name`, any string."""
    return f"{_quoted(prefix, safe=':')}:count:{_quoted(name, safe=':')}"


def installation_key(prefix: str) -> str:
    """Return the key that holds the name of the installation."""
    return f"{_quoted(prefix, safe=':')}:installation"


def _quoted(text: str, safe: str) -> str:
    return quote(text, safe=safe, errors="surrogatepass")


@lru_cache(maxsize=4096)
def _shard_tag(queue: str, shard: int, shards: int) -> str:
    """Return the first tag whose slot is in this shard's range of all slots.

    Plain tags are spread unevenly: eight of them gave three nodes four, two and two shards. All slots are equally
    likely, so about `shards` tries are needed.
    """
    from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot  # here, because web processes without Redis do not load it

    low = shard * REDIS_CLUSTER_HASH_SLOTS // shards
    high = (shard + 1) * REDIS_CLUSTER_HASH_SLOTS // shards
    tag, attempt = f"{queue}.{shard}", 0
    while shards > 1 and not low <= key_slot(tag.encode()) < high:
        attempt += 1
        tag = f"{queue}.{shard}.{attempt}"
    return tag


MAX_BATCH: Final = 1000
"""Members that one script may change: 100,000 would block every client of the server for most of a second."""
MAX_PEEK: Final = 500
MAX_ID: Final = 2**63 - 1
MAX_DUE_MS: Final = 2**42 - 1
"""In the year 2109: the time shares an exact double with the lease and the deliveries."""
MAX_LEASE_MS: Final = 24 * 60 * 60 * 1000
"""`ensure` overrides a lease that ends later: it is a forgery, or the clock was set back."""

NO_LEASE: Final = 2**52
"""The token of a lease that ended in 1970, which no worker has."""
MAX_AHEAD_MS: Final = 1000
SLICES: Final = 10
"""The parts into which the period of a counter is divided."""

DUE_UNIT: Final = 1024
"""The value of one millisecond in a score (`lua/include/score.lua` describes the layout)."""


class Entry(NamedTuple):
    """One leased id, and how many of its deliveries have no result, this one included (1 to 15).

    2 or more: a process has died, or lost its lease, while it held the entry.
    """

    id: int
    deliveries: int


class Lease(NamedTuple):
    """The right to acknowledge, release and extend what one `reserve` returned. Opaque outside the engine."""

    token: int


class Reserved(NamedTuple):
    """The answer of one `reserve`.

    `next_due_ms` is when the queue next has work (a due time, or the expiry of a lease), at or before `now_ms` if
    more is due already, and None if the queue is empty. Both times are the server's, so their difference is the
    time to wait, whatever the clock of the worker. `lease` is None if and only if `entries` is empty.
    """

    lease: Lease | None
    entries: tuple[Entry, ...]
    next_due_ms: int | None
    now_ms: int
    discarded: int


class QueueStats(NamedTuple):
    """Counts of entries. `due`: those that `reserve` would return now. `leased`: those with a valid lease."""

    total: int
    leased: int
    due: int
    next_due_ms: int | None
    now_ms: int


class Change(NamedTuple):
    """One change for `Engine.apply`.

    `due_ms` None removes the entry. `earlier_only` adds it, or moves a pending one forward (`ensure`). Otherwise the
    due time is set, and a lease on the entry ends (`reschedule`).
    """

    queue: str
    id: int
    due_ms: int | None
    earlier_only: bool = False


def checked_id(id: int) -> str:
    """Return the id as a member in Redis. Raises ValueError outside [1, 2**63), TypeError for other types than int."""
    if not isinstance(id, int) or isinstance(id, bool):
        raise TypeError(f"an entry's id is an int, not {id!r}")
    if not 0 < id <= MAX_ID:
        raise ValueError(f"an entry's id is in [1, 2**63), not {id}")
    return str(id)


def checked_pair(id: int, due_ms: int) -> tuple[int, str]:
    """Return score and member of a pending entry.

    Raises ValueError outside [0, 2**42) ms, TypeError for other types than int.
    """
    if not isinstance(due_ms, int) or isinstance(due_ms, bool):
        raise TypeError(f"a due time is an int of milliseconds since 1970, rounded up by the caller, not {due_ms!r}")
    if not 0 <= due_ms <= MAX_DUE_MS:
        raise ValueError(f"a due time is in [0, 2**42) milliseconds since 1970, not {due_ms}")
    return due_ms * DUE_UNIT, checked_id(id)


def checked_lease_ms(lease_ms: int) -> int:
    """Return the lease time. Raises ValueError outside [1 ms, 24 h]."""
    if not 1 <= lease_ms <= MAX_LEASE_MS:
        raise ValueError(f"a lease lasts from 1 ms to 24 hours, not {lease_ms} ms")
    return int(lease_ms)
