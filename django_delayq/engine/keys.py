"""Every key of the engine: its name, its type and what it means.

    delayq:{queue.shard}:z   sorted set   all entries of one queue and shard: id -> score (lua/include/score.lua)
    delayq:{queue.shard}:n   string       0 to 63, tells apart leases that end in the same millisecond
    delayq:{queue.shard}:w   channel      the earliest due time in ms, published whenever it moves forward
    ...:foreign:<ms>         any          what lay under one of these names with another type, moved aside

The braces are Redis Cluster's hash tag: all keys of one shard share a slot, as one script needs them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote
from zlib import crc32

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot


@dataclass(frozen=True, slots=True)
class AsideKeys:
    """The two keys of a queue, and the names that they get when they turn out to be somebody else's."""

    entries: str
    counter: str
    entries_aside: str
    counter_aside: str


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one queue and shard."""

    entries: str
    counter: str
    wake: str

    def aside(self, ms: int) -> AsideKeys:
        """The names to move foreign keys to; `ms` is only a label."""
        return AsideKeys(self.entries, self.counter, f"{self.entries}:foreign:{ms}", f"{self.counter}:foreign:{ms}")


def queue_keys(prefix: str, queue: str, shard: int, shards: int) -> QueueKeys:
    """The keys of one shard of a queue. Raises ValueError unless 0 <= shard < shards.

    Prefix and queue name are any text: what could end or begin a hash tag is quoted, reversibly, so that two names
    never share a key.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} is not one of {shards}")
    tag = _shard_tag(_quoted(queue, safe=""), shard, shards)
    base = f"{_quoted(prefix, safe=':')}:{{{tag}}}"
    return QueueKeys(entries=f"{base}:z", counter=f"{base}:n", wake=f"{base}:w")


def shard_of(id: int, shards: int) -> int:
    """The shard that an id belongs to: stable for ever, as long as the number of shards is."""
    return crc32(b"%d" % id) % shards


def _quoted(text: str, safe: str) -> str:
    return quote(text, safe=safe, errors="surrogatepass")


@lru_cache(maxsize=4096)
def _shard_tag(queue: str, shard: int, shards: int) -> str:
    """The first tag whose slot lies in this shard's share of all slots.

    Plain tags land unevenly: eight of them gave three nodes four, two and two shards. Each slot is as likely as any
    other, so about `shards` tries are needed.
    """
    low = shard * REDIS_CLUSTER_HASH_SLOTS // shards
    high = (shard + 1) * REDIS_CLUSTER_HASH_SLOTS // shards
    tag, attempt = f"{queue}.{shard}", 0
    while shards > 1 and not low <= key_slot(tag.encode()) < high:
        attempt += 1
        tag = f"{queue}.{shard}.{attempt}"
    return tag
