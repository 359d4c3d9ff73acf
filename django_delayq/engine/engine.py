"""`DelayQueue`, whose methods are Lua commands, and `Engine`: all queues and shards behind one client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Final, NamedTuple
from weakref import WeakSet
from zlib import crc32

from django_delayq.engine.records import (
    MAX_DUE_MS,
    MAX_ID,
    SLICES,
    Change,
    QueueKeys,
    counter_key,
)
from django_delayq.engine.scripts import Call, Caller, Client, translated
from django_delayq.engine.wakeup import Wakeup
from django_delayq.exceptions import EngineError

MAX_BATCH: Final = 1000
"""Members that one script may change: 100,000 would block every client of the server for most of a second."""
MAX_PEEK: Final = 500
MAX_LEASE_MS: Final = 24 * 60 * 60 * 1000
"""An engine may honour shorter leases only: see `Engine`."""
NO_LEASE: Final = 2**52
"""The token of a lease that ended in 1970, which no worker has."""
MAX_AHEAD_MS: Final = 1000
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


@contextmanager
def understood(command: str) -> Iterator[None]:
    """Raise EngineError if the reply to `command` is not what it returns: another server answers, or a broken proxy.

    Other errors would end each pass of a worker, which then would not fall back to the ledger.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"Redis sent a reply to {command} that has another form: {error}") from error


class DelayQueue:
    """The entries of one queue and shard: ids that are pending, or leased by a worker. Thread-safe.

    They are hints: an entry may be lost, doubled or early, and the worker decides by the ledger. Ids are ints in
    [1, 2**63), due times ints of milliseconds since 1970 in [0, 2**42), rounded up by the caller, by the clock of the
    Redis server. More than 1,000 entries are sent as several commands in one round trip, which are not atomic
    together. Nothing is sent if any argument is invalid (ValueError, TypeError).

    Every method raises EngineUnavailable or EngineError, and may be repeated.
    """

    def __init__(self, caller: Caller, name: str, keys: QueueKeys, longest_lease_ms: int = MAX_LEASE_MS) -> None:
        self.name = name
        self.keys = keys
        self._caller = caller
        self._longest_lease_ms = longest_lease_ms

    def ensure(self, entries: Iterable[tuple[int, int]]) -> int:
        """Add each (id, due ms), or move a pending entry forward; return how many were added or moved.

        Never moves an entry back, and never changes a leased one.
        """
        return self._count(self.calls("ensure", entries))

    def reschedule(self, entries: Iterable[tuple[int, int]]) -> int:
        """Set the due time of each (id, due ms), and end its lease; return how many changed."""
        return self._count(self.calls("reschedule", entries))

    def remove(self, ids: Iterable[int]) -> int:
        """Remove the ids; return how many existed."""
        return self._count(self.calls("remove", ids))

    def reserve(self, limit: int, lease_ms: int, ahead_ms: int = 0) -> Reserved:
        """Lease up to `limit` (at most 1,000) due entries to the caller for `lease_ms`.

        Expired leases come first, then pending entries, each kind earliest first, and then leases that end later than
        any may; with `ahead_ms` (at most 1,000) also
        those that fall due within that time, for a caller that prepares them. No other caller gets them before the
        lease ends. Works when Redis is out of memory. Invalid members are removed, counted in `discarded`, and logged
        once for each queue.
        """
        if limit < 1:
            raise ValueError(f"the limit of a reserve is 1 or more, not {limit}")
        if not 0 <= ahead_ms <= MAX_AHEAD_MS:  # other workers could fire such entries meanwhile
            raise ValueError(f"entries are reserved at most 1 second ahead of time, not {ahead_ms} ms")
        args = (min(int(limit), MAX_BATCH), checked_lease_ms(lease_ms), int(ahead_ms), self._longest_lease_ms)
        reply = self._one("reserve", args)
        with understood("reserve"):
            *numbers, ids, deliveries = reply
            now_ms, next_ms, token, discarded = map(int, numbers)
            entries = tuple(
                Entry(int(checked_id(int(id))), int(count)) for id, count in zip(ids, deliveries, strict=True)
            )
        if discarded:
            self._caller.log_once(
                "foreign_members",
                self.name,
                "Queue %r contained invalid members, now removed (%d). Later ones are removed without a log line",
                self.name,
                discarded,
            )
        return Reserved(
            lease=Lease(token) if entries else None,
            entries=entries,
            next_due_ms=next_ms if next_ms >= 0 else None,
            now_ms=now_ms,
            discarded=discarded,
        )

    def acknowledge(self, lease: Lease, ids: Iterable[int] | None = None) -> int:
        """Remove those of the ids that this lease still holds, None: all of them; return how many.

        An expired lease holds its entries until another reserve takes them.
        """
        if ids is None:
            return self._count([Call("acknowledge_all", self.keys, (lease.token,))])
        return self._count(self.calls("acknowledge", ids, lease))

    def release(self, lease: Lease, entries: Iterable[tuple[int, int]]) -> int:
        """Make each (id, due ms) that this lease still holds pending again; return how many.

        The delivery is not counted.
        """
        return self._count(self.calls("release", entries, lease))

    def extend(self, lease: Lease, lease_ms: int) -> tuple[Lease, int]:
        """Move the entries of this lease to a new one that ends `lease_ms` from now.

        Return the new lease and how many entries it holds. With 0 the old lease is returned, and it holds nothing. If
        the reply is lost, so is the lease: its entries are due again when it ends.
        """
        token, count = self._extend(lease.token, checked_lease_ms(lease_ms))
        return (Lease(token) if count else lease), count

    def probe(self) -> None:
        """Raise EngineUnavailable or EngineError unless entries can be reserved now. Changes none.

        It writes, and needs both keys, as `reserve` does: while a slot of a cluster is being moved, a command on one
        key may succeed although `reserve` is refused.
        """
        self._extend(NO_LEASE, 1)

    def _extend(self, token: int, lease_ms: int) -> tuple[int, int]:
        reply = self._one("extend", (token, lease_ms))
        with understood("extend"):
            new, count = map(int, reply)
            return new, count

    def stats(self) -> QueueStats:
        """Return counts of entries, at a cost that does not depend on them."""
        reply = self._one("stats")
        with understood("stats"):
            total, leased, due, next_ms, now_ms = map(int, reply)
        return QueueStats(total, leased, due, next_ms if next_ms >= 0 else None, now_ms)

    def peek(self, limit: int = 100) -> list[tuple[int, int]]:
        """Return the first `limit` (at most 500) entries as (id, due ms or lease expiry), by time."""
        if limit < 1:
            raise ValueError(f"the limit of a peek is 1 or more, not {limit}")
        limit = min(int(limit), MAX_PEEK)
        flat = self._one("peek", (limit,))
        with understood("peek"):
            shown = [(int(id), int(ms)) for id, ms in zip(flat[::2], flat[1::2], strict=True)]
        return sorted(shown, key=lambda pair: pair[1])[:limit]

    def calls(self, command: str, items: Iterable[Any], lease: Lease | None = None) -> list[Call]:
        """Return the calls of a command on ids, or on pairs of id and due ms, for a round trip over several queues."""
        has_pairs = command in ("ensure", "reschedule", "release")
        words: list[tuple[int | str, ...]] = [
            checked_pair(*item) if has_pairs else (checked_id(item),) for item in items
        ]
        head: list[int | str] = [self.keys.wake] if has_pairs else []
        if command == "ensure":
            head.append(self._longest_lease_ms)
        if lease is not None:
            head.append(lease.token)
        batches = (words[start : start + MAX_BATCH] for start in range(0, len(words), MAX_BATCH))
        return [Call(command, self.keys, (*head, *chain.from_iterable(batch))) for batch in batches]

    def _one(self, command: str, args: tuple[int, ...] = ()) -> Any:
        return self._caller.send([Call(command, self.keys, args)])[0]

    def _count(self, calls: list[Call]) -> int:
        replies = self._caller.send(calls)
        with understood(calls[0].command if calls else ""):
            return sum(map(int, replies))


class Engine:
    """Every queue of one prefix: finds the shard of an id, and changes many queues in one round trip. Thread-safe.

    The number of shards is fixed as long as the data exists: with another number, entries are searched in other shards
    until the sweep has added them again.

    A lease that ends later than `longest_lease_ms` from now ends at once: it is a forgery, or the server's clock was
    ahead when it was given.
    """

    def __init__(
        self,
        client: Client,
        *,
        prefix: str = "delayq",
        shards: int = 1,
        caller: Caller | None = None,
        longest_lease_ms: int = MAX_LEASE_MS,
    ) -> None:
        if shards < 1:
            raise ValueError(f"an engine has 1 shard or more, not {shards}")
        self.client = client
        self.prefix = prefix
        self.shards = shards
        self.longest_lease_ms = longest_lease_ms
        self.caller = caller or Caller(client)
        self._queues: dict[tuple[str, int], DelayQueue] = {}
        self._wakeups: WeakSet[Wakeup] = WeakSet()

    def queue(self, name: str, shard: int) -> DelayQueue:
        """Return a shard of a queue, always the same object. Raises ValueError unless 0 <= shard < shards."""
        found = self._queues.get((name, shard))
        if found is None:
            keys = QueueKeys.of(self.prefix, name, shard, self.shards)
            found = self._queues.setdefault((name, shard), DelayQueue(self.caller, name, keys, self.longest_lease_ms))
        return found

    def queues(self, names: Iterable[str]) -> list[DelayQueue]:
        """Return every shard of these queues."""
        return [self.queue(name, shard) for name in names for shard in range(self.shards)]

    def shard_of(self, id: int) -> int:
        """Return the shard of an id. It depends only on the number of shards."""
        return crc32(b"%d" % id) % self.shards if self.shards > 1 else 0

    def apply(self, changes: Sequence[Change]) -> None:
        """Make all changes, in their order for each id, in one round trip over all queues and shards.

        They are not atomic together, and may be repeated. Raises ValueError before anything is sent, and
        EngineUnavailable or EngineError after all other changes have been tried.
        """
        runs: dict[tuple[str, int], list[tuple[str, list[Any]]]] = {}
        for name, row_id, due_ms, earlier_only in changes:
            kind = "remove" if due_ms is None else "ensure" if earlier_only else "reschedule"
            of_queue = runs.setdefault((name, self.shard_of(row_id)), [])
            if not of_queue or of_queue[-1][0] != kind:  # adjacent changes of one kind are one command
                of_queue.append((kind, []))
            of_queue[-1][1].append(row_id if due_ms is None else (row_id, due_ms))
        calls: list[Call] = []
        for place, of_queue in runs.items():
            for kind, items in of_queue:
                calls += self.queue(*place).calls(kind, items)
        self.caller.send(calls)

    def count(self, name: str, amount: int, slice_ms: int) -> int:
        """Add to the counter `name`, and return what it has counted in the present slice and the complete ones before.

        These are `SLICES` slices of `slice_ms` by the clock of the server. After as many without a call the counter
        expires. Raises EngineUnavailable or EngineError; the amount may then have been added.
        """
        call = Call("count", (counter_key(self.prefix, name),), (int(amount), int(slice_ms), SLICES))
        (reply,) = self.caller.send([call])
        with understood("count"):
            return int(reply)

    def wakeup(self, queues: Sequence[str]) -> Wakeup:
        """Return a wakeup, not yet started, for every shard of these queues."""
        wakeup = Wakeup(self.client, [queue.keys.wake for queue in self.queues(queues)])
        self._wakeups.add(wakeup)
        return wakeup

    def ping(self) -> None:
        with translated(self.client):
            self.client.ping()

    def close(self) -> None:
        """Stop every wakeup and close the connections of the client. Raises nothing if Redis is unavailable.

        A later call opens connections again.
        """
        for wakeup in list(self._wakeups):
            wakeup.close()
        with suppress(EngineError), translated(self.client):  # a broken connection needs no closing
            self.client.close()
