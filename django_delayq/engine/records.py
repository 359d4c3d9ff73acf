"""Every key in Redis, and what a process needs that only describes changes. Does not load redis-py.

    delayq:{queue.shard}:l:<line>  sorted set  the entries of one line: id -> score (lua/include/score.lua); expires
    delayq:{queue.shard}:h   sorted set   line -> its head, the ms of its next work: a due time, or the end of a lease
    delayq:{queue.shard}:n   string       0 to 63, distinguishes leases that end in one millisecond
    delayq:{queue.shard}:w   channel      the earliest due time of a line in ms, published whenever it moves forward
    delayq:count:<name>      string       a counter of the last minutes or hours, such as that of a brake; expires
    ...:foreign:<ms>         any          a key of another type under one of these names, renamed
    delayq:turn:<work>       string       whose turn a background pass is; expires

"delayq" is the prefix of the ledger here: see `redis_clients.key_prefix`.

A line is the timeouts of one policy: its label as the rows have it. So a worker asks only those that it may fire now.

The braces are Redis Cluster's hash tag: all keys of one shard share a slot, because one script needs several.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, unquote


class QueueKeys(NamedTuple):
    """The keys of one queue and shard but those of its lines, and its channel."""

    heads: str
    counter: str
    wake: str

    @classmethod
    def of(cls, prefix: str, queue: str, shard: int, shards: int) -> QueueKeys:
        """Return the keys of one shard of a queue. Raises ValueError unless 0 <= shard < shards.

        Prefix and queue name are any strings. Characters of a hash tag are quoted reversibly, so that two names never
        share a key.
        """
        if not 0 <= shard < shards:
            raise ValueError(f"shard {shard} is not one of {shards}")
        tag = _shard_tag(quoted(queue), shard, shards)
        base = f"{_quoted(prefix, safe=':')}:{{{tag}}}"
        return cls(heads=f"{base}:h", counter=f"{base}:n", wake=f"{base}:w")

    def line(self, line: str) -> str:
        """Return the key of the entries of a line, any string."""
        return self.named(quoted(line))

    def named(self, name: str) -> str:
        """Return the key of the line whose name among the heads is `name`."""
        return f"{self.heads[:-1]}l:{name}"


def type_of(key: str) -> str | None:
    """Return the type of a key of a queue; None: it is none of these."""
    kind = key.partition("}:")[2].partition(":")[0]
    return {"h": "zset", "l": "zset", "n": "string"}.get(kind)


def quoted(name: str) -> str:
    """Return the name of a queue or line as keys and heads contain it."""
    return _quoted(name, safe="")


def unquoted(name: str) -> str:
    """Reverse `quoted`."""
    return unquote(name, errors="surrogatepass")


def counter_key(prefix: str, name: str) -> str:
    """Return the key of the counter `name`, any string."""
    return f"{_quoted(prefix, safe=':')}:count:{_quoted(name, safe=':')}"


def turn_key(prefix: str, work: str) -> str:
    """Return the key of the turn of a worker to do `work`."""
    return f"{_quoted(prefix, safe=':')}:turn:{work}"


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


MAX_ID: Final = 2**63 - 1
"""The greatest id that a database gives: with a greater one, read from Redis, its query would fail."""
MAX_DUE_MS: Final = 2**42 - 1
"""In the year 2109: a later time would need the bits of a score that mean a lease."""
SLICES: Final = 10
"""The parts of a counter's period: with fewer, what is older than the period would count for longer."""


class Change(NamedTuple):
    """One change for `Engine.apply`.

    `due_ms` None removes the entry. `earlier_only` adds it, or moves a pending one forward (`ensure`). Otherwise the
    due time is set, and a lease on the entry ends (`reschedule`).
    """

    queue: str
    line: str
    id: int
    due_ms: int | None
    earlier_only: bool = False
