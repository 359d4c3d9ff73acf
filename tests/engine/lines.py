"""One line of a queue as if it were the whole queue, for the tests of what every line does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django_delayq.engine.engine import DelayQueue, Engine, Lease, QueueStats

LINE = "shop.Order.pay"


class Entry(NamedTuple):
    """One leased id."""

    id: int
    deliveries: int


class LineReserved(NamedTuple):
    """What a reserve of one line answers, and the head that it left."""

    lease: Lease | None
    entries: tuple[Entry, ...]
    next_due_ms: int | None
    now_ms: int
    discarded: int


class OneLine:
    """The commands of a queue on one of its lines."""

    is_alone = False
    """Whether no other client changes the line meanwhile, so that its head can be read."""

    def __init__(self, queue: DelayQueue, line: str = LINE) -> None:
        self.queue = queue
        self.line = line
        self.name, self.keys, self.entries = queue.name, queue.keys, queue.keys.line(line)
        self.acknowledge, self.release = queue.acknowledge, queue.release
        self.extend, self.probe = queue.extend, queue.probe

    def ensure(self, entries: Iterable[tuple[int, int]]) -> int:
        return self.queue.ensure(self.line, entries)

    def reschedule(self, entries: Iterable[tuple[int, int]]) -> int:
        return self.queue.reschedule(self.line, entries)

    def remove(self, ids: Iterable[int]) -> int:
        return self.queue.remove(self.line, ids)

    def reserve(self, limit: int, lease_ms: int, ahead_ms: int = 0) -> LineReserved:
        lease, entries, heads, now_ms, discarded = self.queue.reserve({self.line: limit}, lease_ms, ahead_ms)
        assert {entry.line for entry in entries} <= {self.line}
        head = heads.get(self.line)
        if self.is_alone:
            head = self.head()
            assert heads.get(self.line) == (None if head is None or head > now_ms + 1000 else head)
        return LineReserved(lease, tuple(Entry(id, count) for id, count, _ in entries), head, now_ms, discarded)

    def head(self) -> int | None:
        """Return the head of the line as Redis has it."""
        client: Any = self.queue._caller.client
        score = client.zscore(self.keys.heads, self.entries.removeprefix(self.keys.line("")))
        return None if score is None else int(score)

    def stats(self) -> QueueStats:
        return self.queue.stats_of(self.line)

    def peek(self, limit: int = 100) -> list[tuple[int, int]]:
        return self.queue.peek(limit, self.line)


def one_line(engine: Engine, name: str = "default", shard: int = 0, line: str = LINE) -> OneLine:
    return OneLine(engine.queue(name, shard), line)


def lease_of(token: int, line: str = LINE, ids: Iterable[int] = ()) -> Lease:
    """Return a lease on one line that no reserve gave."""
    return Lease(((line, token),), dict.fromkeys(ids, line))
