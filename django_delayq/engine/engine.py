"""`DelayQueue`, whose methods are Lua commands, and `Engine`: all queues and shards behind one client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet
from zlib import crc32

from django_delayq.engine.records import (
    MAX_DUE_MS,
    MAX_ID,
    SLICES,
    Change,
    QueueKeys,
    counter_key,
    quoted,
    unquoted,
)
from django_delayq.engine.scripts import Call, Caller, Client, text_of, translated
from django_delayq.engine.wakeup import Wakeup
from django_delayq.exceptions import EngineError

T = TypeVar("T")

MAX_BATCH: Final = 1000
"""Members that one script may change: 100,000 would block every client of the server for most of a second."""
MAX_LINES: Final = 100
"""Lines of one script: each costs about ten reads, and all other clients wait for it."""
HEADS_MS: Final = 1000
"""A worker waits no longer, so it need not know of work that begins later; an idle queue's reply stays short."""
MAX_PEEK: Final = 500
"""Entries that are only shown: without a limit, the reply about a backlog would be hundreds of megabytes."""
MAX_LEASE_MS: Final = 24 * 60 * 60 * 1000
"""A longer lease is a forgery, or of a clock that was ahead, and would hold its entry. See also `Engine`."""
NO_LEASE: Final = 2**52
"""The token of a lease that ended in 1970, which no worker has: a probe with another one could move entries."""
MAX_AHEAD_MS: Final = 1000
"""Entries leased earlier would be held by a worker that may die before they are due."""
DUE_UNIT: Final = 1024
"""The value of one millisecond in a score (`lua/include/score.lua` describes the layout)."""


class Entry(NamedTuple):
    """One leased id of a line, and how many of its deliveries have no result, this one included (1 to 15).

    2 or more: a process has died, or lost its lease, while it held the entry.
    """

    id: int
    deliveries: int
    line: str


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to acknowledge, release and extend what one `reserve` returned. Opaque outside the engine.

    `tokens` has the token of each line, and `lines` the line of each id.
    """

    tokens: tuple[tuple[str, int], ...]
    lines: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)


class Reserved(NamedTuple):
    """The answer of one `reserve`.

    `heads` has each line of the queue, asked or not, whose next work (a due time, or the expiry of a lease) is at most
    `HEADS_MS` later than `now_ms`, or earlier, as it is after this reserve: of the lines that the caller names, or else
    of all, and then of more than 1,000 the earliest. All times are the server's, so their difference is the time to
    wait, whatever the clock of the worker.
    `lease` is None if and only if `entries` is empty.
    """

    lease: Lease | None
    entries: tuple[Entry, ...]
    heads: Mapping[str, int]
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
    """The entries of one queue and shard, in lines: ids that are pending, or leased by a worker. Thread-safe.

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

    def ensure(self, line: str, entries: Iterable[tuple[int, int]]) -> int:
        """Add each (id, due ms) to the line, or move a pending entry forward; return how many were added or moved.

        Never moves an entry back, and never changes a leased one.
        """
        return self._count(self.calls("ensure", line, entries))

    def reschedule(self, line: str, entries: Iterable[tuple[int, int]]) -> int:
        """Set the due time of each (id, due ms) of the line, and end its lease; return how many changed."""
        return self._count(self.calls("reschedule", line, entries))

    def remove(self, line: str, ids: Iterable[int]) -> int:
        """Remove the ids from the line; return how many existed."""
        return self._count(self.calls("remove", line, ids))

    def reserve(
        self, limits: Mapping[str, int], lease_ms: int, ahead_ms: int = 0, named: Sequence[str] = ()
    ) -> Reserved:
        """Lease due entries of the lines in `limits` to the caller for `lease_ms`, at most so many of each.

        Of each line, expired leases come first, then pending entries, each kind earliest first, and then leases that
        end later than any may; with `ahead_ms` (at most 1,000) also those that fall due within that time, for a caller
        that prepares them. No other caller gets them before the lease ends. At most 1,000 members of each hundred lines
        are changed. Works when Redis is out of memory. Invalid members are removed, counted in `discarded`, and logged
        once for each queue. Without lines it only reads the heads: those of the lines `named`, which no number of
        foreign ones hides, or the first ones of all.
        """
        if any(limit < 1 for limit in limits.values()):
            raise ValueError(f"the limit of a line is 1 or more, not {min(limits.values())}")
        if not 0 <= ahead_ms <= MAX_AHEAD_MS:  # other workers could fire such entries meanwhile
            raise ValueError(f"entries are reserved at most 1 second ahead of time, not {ahead_ms} ms")
        lines = {line: (quoted(line), min(int(limit), MAX_BATCH)) for line, limit in limits.items()}
        times = checked_lease_ms(lease_ms), int(ahead_ms)
        replies = self._reserve(list(lines.values()), times, HEADS_MS, [quoted(line) for line in named])
        tokens: list[tuple[str, int]] = []
        entries: list[Entry] = []
        with understood("reserve"):
            *_, (now, _, heads, _) = replies
            found = [each for *_, of_lines in replies for each in of_lines]
            for line, (token, ids, counts) in zip(lines, found, strict=True):
                tokens += [(line, int(token))] if ids else []
                for id, count in zip(ids, counts, strict=True):
                    entries.append(Entry(int(checked_id(int(id))), int(count), line))
            discarded = sum(int(junk) for _, junk, _, _ in replies)
            now_ms = int(now)
            if named:
                of_named = chain.from_iterable(reply[2] for reply in replies[-len(_parts(named, MAX_BATCH)) :])
                known = {line: float(ms) for line, ms in zip(named, of_named, strict=True) if ms is not None}
                soon = {line: int(max(0.0, ms)) for line, ms in known.items() if ms <= now_ms + HEADS_MS}
            else:
                soon = {unquoted(text_of(name)): int(ms) for name, ms in zip(heads[::2], heads[1::2], strict=True)}
        if discarded:
            self._caller.log_once(
                "foreign_members",
                self.name,
                "Queue %r contained invalid members, now removed (%d). Later ones are removed without a log line",
                self.name,
                discarded,
            )
        lease = Lease(tuple(tokens), {entry.id: entry.line for entry in entries}) if entries else None
        return Reserved(lease, tuple(entries), soon, now_ms, discarded)

    def acknowledge(self, lease: Lease, ids: Iterable[int] | None = None) -> int:
        """Remove those of the ids that this lease still holds, None: all of them; return how many.

        An expired lease holds its entries until another reserve takes them.
        """
        ids = lease.lines if ids is None else ids
        return self._count(self.calls_of(lease, "acknowledge", ((id, id) for id in ids)))

    def release(self, lease: Lease, entries: Iterable[tuple[int, int]]) -> int:
        """Make each (id, due ms) that this lease still holds pending again; return how many.

        The delivery is not counted.
        """
        return self._count(self.calls_of(lease, "release", ((pair[0], pair) for pair in entries)))

    def extend(self, lease: Lease, lease_ms: int) -> tuple[Lease, int]:
        """Move the entries of this lease to a new one that ends `lease_ms` from now.

        Return the new lease and how many entries it holds. With 0 the old lease is returned, and it holds nothing. If
        the reply is lost, so is the lease: its entries are due again when it ends.
        """
        replies = self._extend(lease.tokens, checked_lease_ms(lease_ms))
        tokens, total = [], 0
        with understood("extend"):
            for (line, _), (token, count) in zip(lease.tokens, replies, strict=True):
                tokens += [(line, int(token))] if int(count) else []
                total += int(count)
        return (Lease(tuple(tokens), lease.lines) if total else lease), total

    def probe(self) -> None:
        """Raise EngineUnavailable or EngineError unless entries can be reserved now. Changes none.

        It writes, and needs heads, counter and a line that does not exist: while a slot of a cluster is being moved, a
        command on keys that all exist may succeed although others are refused.
        """
        self._extend([("", NO_LEASE)], 1)

    def _extend(self, tokens: Iterable[tuple[str, int]], lease_ms: int) -> list[Any]:
        heads, counter, _ = self.keys
        calls = [Call("extend", (heads, counter, self.keys.line(line)), (token, lease_ms)) for line, token in tokens]
        return self._caller.send(calls)

    def stats(self) -> QueueStats:
        """Return counts of the entries of all lines with a head, at a cost that depends on the lines only."""
        names, now_ms = self._names()
        return self._stats([self.keys.named(name) for name in names], now_ms)

    def stats_of(self, line: str) -> QueueStats:
        """Return counts of the entries of one line, at a cost that does not depend on them."""
        return self._stats([self.keys.line(line)], 0)

    def _stats(self, lines: Sequence[str], now_ms: int) -> QueueStats:
        replies = self._caller.send([Call("stats", part) for part in _parts(lines, MAX_LINES)])
        total = leased = due = 0
        times = []
        with understood("stats"):
            for reply in replies:
                count, under_lease, now_due, next_ms, now_ms = map(int, reply)
                total, leased, due = total + count, leased + under_lease, due + now_due
                times += [next_ms] if next_ms >= 0 else []
        return QueueStats(total, leased, due, min(times, default=None), now_ms)

    def peek(self, limit: int = 100, line: str | None = None) -> list[tuple[int, int]]:
        """Return the first `limit` (at most 500) entries, of one line if given, as (id, due ms or lease expiry)."""
        if limit < 1:
            raise ValueError(f"the limit of a peek is 1 or more, not {limit}")
        limit = min(int(limit), MAX_PEEK)
        # Each line has an entry that is as early as its head, so later ones than these are not among the first.
        lines = [self.keys.named(name) for name in self._names()[0][:limit]] if line is None else [self.keys.line(line)]
        shown = []
        for flat in self._caller.send([Call("peek", (each,), (limit,)) for each in lines]):
            with understood("peek"):
                shown += [(int(id), int(ms)) for id, ms in zip(flat[::2], flat[1::2], strict=True)]
        return sorted(shown, key=lambda pair: pair[1])[:limit]

    def correct_heads(self) -> None:
        """Set the heads of all lines to what their entries say: of a line that has expired, or forged ones."""
        names, _ = self._names()
        self._reserve([(name, 0) for name in names], (1, 0), HEADS_MS)

    def foreign_heads(self, owned: Iterable[str]) -> list[bytes]:
        """Return names among the heads, at most 1,000, which are not those of the lines `owned`."""
        client: Any = self._caller.client
        known = {quoted(line).encode() for line in owned}
        end = MAX_BATCH + len(known)  # so that some are found if there are any
        with translated(client), understood("zrangebyscore"):
            ask: Any = ("ZRANGEBYSCORE", self.keys.heads, "-inf", "+inf", "LIMIT", 0, end)
            found: Any = client.execute_command(*ask, NEVER_DECODE=True)
            return [name for name in found if name not in known][:MAX_BATCH]

    def remove_foreign(self, owned: Collection[str], between: Callable[[], object] = lambda: None) -> int:
        """Remove the lines that are not `owned`, at most a million; return how many. Logged once for each queue.

        Call `between` after each thousand.
        """
        removed = 0
        while removed < MAX_BATCH**2 and (names := self.foreign_heads(owned)):
            with translated(self._caller.client), self._caller.client.pipeline(transaction=False) as pipeline:
                pipeline.zrem(self.keys.heads, *names)
                for name in names:
                    pipeline.pexpire(self.keys.named("").encode() + name, 0)  # allowed to a user that may not delete
                pipeline.execute()
            words = "Queue %r had lines of no policy, such as %r, which are removed, as are later ones: does another "
            words += "application write to this Redis?"
            self._caller.log_once("foreign_lines", self.name, words, self.name, names[0][:MAX_LINES])
            removed += len(names)
            between()
        return removed

    def _names(self) -> tuple[list[str], int]:
        """Return the names of the lines with a head, at most 1,000, the earliest first, and the server's time."""
        with understood("reserve"):
            ((now_ms, _, heads, _),) = self._reserve([], (1, 0), "inf")
            return [text_of(name) for name in heads[::2]], int(now_ms)

    def _reserve(
        self, lines: Sequence[tuple[str, int]], times: tuple[int, int], heads_ms: int | str, named: Sequence[str] = ()
    ) -> list[Any]:
        """Return the replies to a reserve of lines, given by their names among the heads and their limits.

        The last of them have the heads of the lines `named`.
        """
        args = (*times, self._longest_lease_ms, heads_ms)
        parts = zip_longest(_parts(lines, MAX_LINES)[::-1] or [[]], _parts(named, MAX_BATCH)[::-1], fillvalue=())
        calls = []
        for part, names in [*parts][::-1]:
            keys = self.keys.heads, self.keys.counter, *(self.keys.named(name) for name, _ in part)
            calls.append(Call("reserve", keys, (*args, *(limit for _, limit in part), *names)))
        return self._caller.send(calls)

    def calls(self, command: str, line: str, items: Iterable[Any], token: int | None = None) -> list[Call]:
        """Return the calls of a command on ids, or on pairs of id and due ms, for a round trip over several queues."""
        has_pairs, adds = command in ("ensure", "reschedule", "release"), command in ("ensure", "reschedule")
        words: list[tuple[int | str, ...]] = [
            checked_pair(*item) if has_pairs else (checked_id(item),) for item in items
        ]
        head: list[int | str] = [self.keys.wake] if has_pairs else []
        if adds:
            head.append(max((int(score) for score, _ in words), default=0) // DUE_UNIT)
        if command == "ensure":
            head.append(self._longest_lease_ms)
        if token is not None:
            head.append(token)
        keys = self._keys_of(line)
        return [Call(command, keys, (*head, *chain.from_iterable(batch))) for batch in _parts(words, MAX_BATCH)]

    def calls_of(self, lease: Lease, command: str, items: Iterable[tuple[int, Any]]) -> list[Call]:
        """Return the calls of a command, for each line of a lease, on pairs of an id and what the command takes."""
        by_line: dict[str | None, list[Any]] = defaultdict(list)
        for id, item in items:
            by_line[lease.lines.get(id)].append(item)
        self.calls(command, "", by_line.pop(None, ()))  # only checked: the lease never held them
        tokens = dict(lease.tokens)
        held = [(line, part) for line, part in by_line.items() if line in tokens]
        return [call for line, part in held for call in self.calls(command, line, part, tokens[line])]

    def _keys_of(self, line: str) -> tuple[str, str]:
        return self.keys.heads, self.keys.line(line)

    def _count(self, calls: list[Call]) -> int:
        replies = self._caller.send(calls)
        with understood(calls[0].command if calls else ""):
            return sum(map(int, replies))


def _parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


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
        runs: dict[tuple[str, int, str], list[tuple[str, list[Any]]]] = {}
        for name, line, row_id, due_ms, earlier_only in changes:
            kind = "remove" if due_ms is None else "ensure" if earlier_only else "reschedule"
            of_line = runs.setdefault((name, self.shard_of(row_id), line), [])
            if not of_line or of_line[-1][0] != kind:  # adjacent changes of one kind are one command
                of_line.append((kind, []))
            of_line[-1][1].append(row_id if due_ms is None else (row_id, due_ms))
        calls: list[Call] = []
        for (name, shard, line), of_line in runs.items():
            for kind, items in of_line:
                calls += self.queue(name, shard).calls(kind, line, items)
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
