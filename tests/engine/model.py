"""The delay queue as dicts, run beside the real one by Hypothesis: what the commands mean, in plain Python.

`machine(client, texts)` makes the state machine for the packaged commands, or for other sources (mutants). Times are
near the clock (-1, 0, +1 ms), since that is where mistakes live; most commands meet in the first of some lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from django_delayq.engine.engine import Lease, Reserved
from django_delayq.engine.scripts import Client
from tests.engine.virtual import VirtualQueue

HEADS_MS = 1000
FIRST, *OTHERS = NAMES = ["shop.Order.pay", "a b", "%"]
LINES = st.sampled_from([FIRST, FIRST, FIRST, *OTHERS])
LIMITS = st.dictionaries(LINES, st.sampled_from([1, 2, 3, 1000]), max_size=3)
IDS = st.integers(1, 7)
SOME_IDS = st.lists(IDS, min_size=1, max_size=3, unique=True)
OFFSETS = st.sampled_from([-1000, -2, -1, 0, 1, 2, 3, 1000])
PAIRS = st.lists(st.tuples(IDS, OFFSETS), min_size=1, max_size=4, unique_by=lambda pair: pair[0])
LEASE_MS = st.sampled_from([1, 2, 3, 1000])
AHEAD_MS = st.sampled_from([0, 0, 0, 1, 3, 1000])
JUNK = st.sampled_from(["x", "007", "-1", "1.5", "1 ", "901", "902", str(2**63), "9" * 40, "\udcff"])
JUNK_SCORES = st.sampled_from(["-inf", "inf", "-5", "12.5", "0.25", str(2**53), "1e300"])
FORGED_MS = st.sampled_from(["-inf", "inf", "-5", "0", "0.5", "1700000000000", "1e300"])


@dataclass
class Held:
    """One entry as it should be."""

    ms: int
    deliveries: int = 0
    lease: Lease | None = None


class QueueMachine(RuleBasedStateMachine):
    """Every command at random, in any order, with every lease ever given out, and what strangers may write between."""

    client: ClassVar[Any]
    texts: ClassVar[Mapping[str, str] | None] = None

    @initialize()
    def begin(self) -> None:
        self.client.flushdb()
        self.virtual = VirtualQueue(self.client, self.texts)
        self.queue = self.virtual.queue.queue
        self.held: dict[str, dict[int, Held]] = {line: {} for line in NAMES}
        self.junk: dict[str, set[bytes]] = {line: set() for line in NAMES}
        self.leases: list[Lease] = []
        self.tokens: set[tuple[str, int]] = set()
        self.wrong: set[str] = set()
        """The lines whose head need not be right until a command changes them."""
        self.believed = dict.fromkeys(NAMES, 0)
        """When a waiting worker will ask each line again."""

    @property
    def now(self) -> int:
        return self.virtual.now

    @rule(line=LINES, pairs=PAIRS)
    def ensure(self, line: str, pairs: list[tuple[int, int]]) -> None:
        wanted, changed = self._moments(pairs), 0
        for id, due in wanted:
            held = self.held[line].get(id)
            if held is None or (held.lease is None and due < held.ms):
                self.held[line][id] = Held(due, held.deliveries if held else 0)
                changed += 1
        assert [self.queue.ensure(line, wanted) for _ in range(2)] == [changed, 0]
        self.wrong.discard(line)

    @rule(line=LINES, pairs=PAIRS)
    def reschedule(self, line: str, pairs: list[tuple[int, int]]) -> None:
        wanted = {id: Held(due) for id, due in self._moments(pairs)}
        changed = sum(self.held[line].get(id) != held for id, held in wanted.items())
        self.held[line] |= wanted
        assert [self.queue.reschedule(line, self._moments(pairs)) for _ in range(2)] == [changed, 0]
        self.wrong.discard(line)

    @rule(line=LINES, ids=SOME_IDS)
    def remove(self, line: str, ids: list[int]) -> None:
        present = [id for id in ids if self.held[line].pop(id, None)]
        assert [self.queue.remove(line, ids) for _ in range(2)] == [len(present), 0]
        self.wrong.discard(line)

    @rule(limits=LIMITS, lease_ms=LEASE_MS, ahead_ms=AHEAD_MS)
    def reserve(self, limits: dict[str, int], lease_ms: int, ahead_ms: int) -> None:
        expected = [(id, line) for line, limit in limits.items() for id in self._reservable(line, ahead_ms)[:limit]]
        reserved = self.queue.reserve(limits, lease_ms, ahead_ms)
        assert [(entry.id, entry.line) for entry in reserved.entries] == expected
        assert (reserved.now_ms, reserved.lease is None) == (self.now, not expected)
        for id, deliveries, line in reserved.entries:
            assert deliveries == min(self.held[line][id].deliveries + 1, 15)
            self.held[line][id] = Held(self.now + lease_ms, deliveries, reserved.lease)
        self._learn(reserved.lease)
        self._check_junk(reserved, limits)
        self.wrong -= limits.keys()
        self._check_heads(reserved)

    @rule(data=st.data(), ids=st.none() | SOME_IDS)
    def acknowledge(self, data: st.DataObject, ids: list[int] | None) -> None:
        if lease := self._any_lease(data):
            mine = self._under(lease, lease.lines if ids is None else ids)
            assert [self.queue.acknowledge(lease, ids) for _ in range(2)] == [len(mine), 0]
            for line, id in mine:
                del self.held[line][id]
            self.wrong -= {line for line, _ in mine}

    @rule(data=st.data(), pairs=PAIRS)
    def release(self, data: st.DataObject, pairs: list[tuple[int, int]]) -> None:
        if lease := self._any_lease(data):
            wanted = dict(self._moments(pairs))
            mine = self._under(lease, wanted)
            assert [self.queue.release(lease, wanted.items()) for _ in range(2)] == [len(mine), 0]
            for line, id in mine:
                self.held[line][id] = Held(wanted[id], self.held[line][id].deliveries - 1)
            self.wrong -= {line for line, _ in mine}

    @rule(data=st.data(), lease_ms=LEASE_MS)
    def extend(self, data: st.DataObject, lease_ms: int) -> None:
        if lease := self._any_lease(data):
            mine = [(line, id) for line in NAMES for id, held in self.held[line].items() if held.lease == lease]
            longer, count = self.queue.extend(lease, lease_ms)
            assert (count, longer != lease) == (len(mine), bool(mine))
            for line, id in mine:
                self.held[line][id] = Held(self.now + lease_ms, self.held[line][id].deliveries, longer)
            self._learn(longer if mine else None)
            self.wrong -= {line for line, _ in mine}

    @rule(ms=st.sampled_from([1, 2, 3, 999, 1000, -1000]))
    def advance(self, ms: int) -> None:
        self.virtual.advance(ms)
        if ms < 0:  # a worker waits by the steady clock of its process
            self.believed = dict.fromkeys(NAMES, 0)

    @rule()
    def forget_scripts(self) -> None:
        self.client.script_flush()

    @rule(line=LINES, member=JUNK, score=JUNK_SCORES)
    def plant_junk(self, line: str, member: str, score: str) -> None:
        raw = member.encode(errors="surrogateescape")
        self.client.zadd(self.queue.keys.line(line), {raw: score})
        self.junk[line].add(raw)
        self.believed[line] = 0  # writes past the engine wake no worker, therefore every wait has a maximum

    @rule(names=st.lists(LINES, unique=True), ms=FORGED_MS)
    def forge_heads(self, names: list[str], ms: str) -> None:
        foreign = {"x y": ms, "\u0967": ms, b"\xff": ms, "a" * 4000: ms}
        self.client.zadd(self.queue.keys.heads, foreign | {self._quoted(name): ms for name in names})
        self.wrong |= set(names)

    @rule()
    def lose_heads(self) -> None:
        self.client.delete(self.queue.keys.heads)
        self.wrong |= set(NAMES)

    @rule(line=LINES)
    def lose_a_line(self, line: str) -> None:
        self.client.delete(self.queue.keys.line(line))
        self.held[line].clear()
        self.junk[line].clear()
        self.wrong.add(line)

    @rule()
    def correct_heads(self) -> None:
        """What lost its head altogether waits for the next ensure."""
        with_head = self._heads()
        self.queue.correct_heads()
        self.wrong -= {line for line in NAMES if self._quoted(line).encode() in with_head}
        self.junk = {line: self.junk[line] & self._members(line).keys() for line in NAMES}
        assert self._heads().keys() <= {self._quoted(line).encode() for line in NAMES}

    @invariant()
    def each_line_is_what_was_asked_for(self) -> None:
        for line in NAMES if hasattr(self, "held") else ():
            found = {int(id): int(score) for id, score in self._members(line).items() if id not in self.junk[line]}
            assert found == {id: _score(line, held) for id, held in self.held[line].items()}

    @invariant()
    def heads_say_what_the_entries_say(self) -> None:
        if hasattr(self, "held"):
            found = self._heads()
            for line in self._known():
                assert found.get(self._quoted(line).encode()) == self._head(line), line

    @invariant()
    def a_waiting_worker_knows_of_everything_earlier_in_each_line(self) -> None:
        if hasattr(self, "held"):
            if self.virtual.wakes():  # a message ends the wait for all lines
                self.believed = dict.fromkeys(NAMES, 0)
            for line in self._known():
                waiting = [held.ms for held in self.held[line].values() if held.lease is None]
                assert not waiting or self.believed[line] <= max(min(waiting), self.now)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "held") and FIRST in self._known():
            every = self.held[FIRST].values()
            live = sum(held.lease is not None and held.ms > self.now for held in every)
            counts = len(every), live, len(self._reservable(FIRST)), self._head(FIRST), self.now
            assert self.queue.stats_of(FIRST) == counts
            assert dict(self.queue.peek(line=FIRST)) == {id: held.ms for id, held in self.held[FIRST].items()}
            if self._known() == set(NAMES):
                assert self.queue.stats().total == sum(map(len, self.held.values()))
                shown = sorted(held.ms for line in NAMES for held in self.held[line].values())
                assert [ms for _, ms in self.queue.peek()] == shown

    def _moments(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(id, self.now + offset) for id, offset in pairs]

    def _quoted(self, line: str) -> str:
        return self.queue.keys.line(line).rpartition(":")[2]

    def _members(self, line: str) -> dict[bytes, float]:
        return dict(self.client.zrange(self.queue.keys.line(line), 0, -1, withscores=True))

    def _heads(self) -> dict[bytes, float]:
        return dict(self.client.zrange(self.queue.keys.heads, 0, -1, withscores=True))

    def _head(self, line: str) -> int | None:
        return min((held.ms for held in self.held[line].values()), default=None)

    def _known(self) -> set[str]:
        """Return the lines whose heads must be right."""
        return {line for line in NAMES if line not in self.wrong and not self.junk[line]}

    def _reservable(self, line: str, ahead_ms: int = 0) -> list[int]:
        """Return the ids that are due, or whose lease is over; what others have leased is not given out ahead."""
        due = {id: held for id, held in self.held[line].items() if held.ms <= self.now + ahead_ms * (not held.lease)}
        return sorted(due, key=lambda id: (due[id].lease is None, _score(line, due[id]), str(id)))

    def _under(self, lease: Lease, ids: Iterable[int]) -> list[tuple[str, int]]:
        """Return the lines and ids that this lease still holds, of those that its caller knows by it."""
        named = [(lease.lines.get(id, ""), id) for id in ids]
        return [(line, id) for line, id in named if line and (held := self.held[line].get(id)) and held.lease == lease]

    def _learn(self, lease: Lease | None) -> None:
        if lease is not None:
            assert self.tokens.isdisjoint(lease.tokens), "a token was given out twice"
            self.tokens |= set(lease.tokens)
            self.leases.append(lease)

    def _any_lease(self, data: st.DataObject) -> Lease | None:
        return data.draw(st.sampled_from(self.leases[::-1])) if self.leases else None

    def _check_junk(self, reserved: Reserved, limits: Mapping[str, int]) -> None:
        scores = {line: self._members(line) for line in NAMES}
        left = {line: self.junk[line] & scores[line].keys() for line in NAMES}
        assert reserved.discarded == sum(len(self.junk[line]) - len(left[line]) for line in limits)
        for line, limit in limits.items():
            assert not any(scores[line][member] >= 2**53 for member in left[line])
            given = sum(entry.line == line for entry in reserved.entries)
            assert not left[line] or given == limit, "junk that was due stayed"
        self.junk = left

    def _check_heads(self, reserved: Reserved) -> None:
        known = self._known()
        heads = {line: ms for line in known if (ms := self._head(line)) is not None and ms <= self.now + HEADS_MS}
        assert {line: ms for line, ms in reserved.heads.items() if line in known} == heads
        # Of a line whose head was lost it learns with the next reserve, at most a second later.
        self.believed = {line: heads.get(line, self.now + HEADS_MS) if line in known else 0 for line in NAMES}
        self.virtual.wakes()


def _score(line: str, held: Held) -> int:
    return dict(held.lease.tokens)[line] + held.deliveries if held.lease else held.ms * 1024 + held.deliveries


def machine(client: Client, texts: Mapping[str, str] | None = None) -> type[QueueMachine]:
    """Return the state machine for one server and one set of commands."""
    members: dict[str, Any] = {"client": client, "texts": texts}
    return type("QueueMachine", (QueueMachine,), members)
