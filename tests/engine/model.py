"""The delay queue as a dict, run beside the real one by Hypothesis: what the commands mean, in plain Python.

`machine(client, texts)` makes the state machine for the packaged commands, or for other sources (mutants).
Times are near the clock (-1, 0, +1 ms), since that is where mistakes live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from django_delayq.engine.engine import Lease
from django_delayq.engine.scripts import Client
from tests.engine.lines import LineReserved, token_of
from tests.engine.virtual import VirtualQueue

NEVER = 2**60
IDS = st.integers(1, 7)
OFFSETS = st.sampled_from([-1000, -2, -1, 0, 1, 2, 3, 1000])
PAIRS = st.lists(st.tuples(IDS, OFFSETS), min_size=1, max_size=4, unique_by=lambda pair: pair[0])
LEASE_MS = st.sampled_from([1, 2, 3, 1000])
JUNK = st.sampled_from(["x", "007", "-1", "1.5", "1 ", "901", "902", str(2**63), "9" * 40, "\udcff"])
JUNK_SCORES = st.sampled_from(["-inf", "inf", "-5", "12.5", "0.25", str(2**53), "1e300"])


@dataclass
class Held:
    """One entry as it should be."""

    ms: int
    deliveries: int = 0
    lease: Lease | None = None


class QueueMachine(RuleBasedStateMachine):
    """Every command at random, in any order, with every lease ever given out, and foreign members in between."""

    client: ClassVar[Any]
    texts: ClassVar[Mapping[str, str] | None] = None

    @initialize()
    def begin(self) -> None:
        self.client.flushdb()
        self.virtual = VirtualQueue(self.client, self.texts)
        self.queue = self.virtual.queue
        self.held: dict[int, Held] = {}
        self.leases: list[Lease] = []
        self.junk: set[bytes] = set()
        self.believed = NEVER
        """When a waiting worker will check again."""

    @property
    def now(self) -> int:
        return self.virtual.now

    @rule(pairs=PAIRS)
    def ensure(self, pairs: list[tuple[int, int]]) -> None:
        changed = 0
        for id, offset in pairs:
            held, due = self.held.get(id), self.now + offset
            if held is None:
                self.held[id] = Held(due)
                changed += 1
            elif held.lease is None and due < held.ms:
                held.ms = due
                changed += 1
        wanted = [(id, self.now + offset) for id, offset in pairs]
        assert self.queue.ensure(wanted) == changed
        assert self.queue.ensure(wanted) == 0, "a repeated ensure changed something"

    @rule(pairs=PAIRS)
    def reschedule(self, pairs: list[tuple[int, int]]) -> None:
        wanted = {id: Held(self.now + offset) for id, offset in pairs}
        changed = sum(self.held.get(id) != held for id, held in wanted.items())
        self.held |= wanted
        entries = [(id, held.ms) for id, held in wanted.items()]
        assert self.queue.reschedule(entries) == changed
        assert self.queue.reschedule(entries) == 0, "a repeated reschedule changed something"

    @rule(ids=st.lists(IDS, min_size=1, max_size=3, unique=True))
    def remove(self, ids: list[int]) -> None:
        present = [id for id in ids if self.held.pop(id, None)]
        assert self.queue.remove(ids) == len(present)
        assert self.queue.remove(ids) == 0

    @rule(limit=st.sampled_from([1, 2, 3, 1000]), lease_ms=LEASE_MS, looks=st.booleans())
    def reserve(self, limit: int, lease_ms: int, looks: bool) -> None:
        expected = self._reservable()[:limit]
        reserved = self.queue.reserve(limit, lease_ms)
        assert [entry.id for entry in reserved.entries] == expected
        assert reserved.now_ms == self.now
        assert (reserved.lease is None) == (not expected)
        for entry in reserved.entries:
            assert entry.deliveries == min(self.held[entry.id].deliveries + 1, 15)
            self.held[entry.id] = Held(self.now + lease_ms, entry.deliveries, reserved.lease)
        self._learn(reserved.lease)
        self._check_junk(reserved, limit)
        if looks:
            self.believed = NEVER if reserved.next_due_ms is None else reserved.next_due_ms
            self.virtual.wakes()

    @rule(data=st.data(), ids=st.none() | st.lists(IDS, min_size=1, max_size=3, unique=True))
    def acknowledge(self, data: st.DataObject, ids: list[int] | None) -> None:
        if lease := self._any_lease(data):
            mine = [id for id in ids or list(self.held) if id in self.held and self.held[id].lease == lease]
            assert self.queue.acknowledge(lease, ids) == len(mine)
            for id in mine:
                del self.held[id]
            assert self.queue.acknowledge(lease, ids) == 0

    @rule(data=st.data(), pairs=PAIRS)
    def release(self, data: st.DataObject, pairs: list[tuple[int, int]]) -> None:
        if lease := self._any_lease(data):
            entries = [(id, self.now + offset) for id, offset in pairs]
            mine = {id: due for id, due in entries if id in self.held and self.held[id].lease == lease}
            assert self.queue.release(lease, entries) == len(mine)
            for id, due in mine.items():
                self.held[id] = Held(due, self.held[id].deliveries - 1)
            assert self.queue.release(lease, entries) == 0

    @rule(data=st.data(), lease_ms=LEASE_MS)
    def extend(self, data: st.DataObject, lease_ms: int) -> None:
        if lease := self._any_lease(data):
            self._extend(lease, lease_ms)

    @rule(ms=st.sampled_from([1, 2, 3, 999, 1000]))
    def advance(self, ms: int) -> None:
        self.virtual.advance(ms)

    @rule()
    def forget_scripts(self) -> None:
        self.client.script_flush()

    @rule(member=JUNK, score=JUNK_SCORES)
    def plant_junk(self, member: str, score: str) -> None:
        raw = member.encode(errors="surrogateescape")
        self.client.zadd(self.virtual.entries, {raw: score})
        self.junk.add(raw)
        self.believed = 0  # writes past the engine wake no worker, therefore every wait has a maximum

    @invariant()
    def the_set_is_what_was_asked_for(self) -> None:
        if hasattr(self, "held"):
            members = self.virtual.members().items()
            found = {int(id): int(score) for id, score in members if id not in self.junk}
            assert found == {id: _score(held) for id, held in self.held.items()}

    @invariant()
    def a_sleeping_worker_knows_of_everything_earlier(self) -> None:
        if hasattr(self, "held"):
            self.believed = min([self.believed, *self.virtual.wakes()])
            waiting = [held.ms for held in self.held.values() if held.lease is None]
            assert not waiting or self.believed <= min(waiting)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "held") and not self.junk:
            stats = self.queue.stats()
            due = len(self._reservable())
            live = sum(held.lease is not None and held.ms > self.now for held in self.held.values())
            assert (stats.total, stats.leased, stats.due) == (len(self.held), live, due)
            assert stats.next_due_ms == min((held.ms for held in self.held.values()), default=None)
            assert dict(self.queue.peek()) == {id: held.ms for id, held in self.held.items()}

    def _reservable(self) -> list[int]:
        due = [(held.lease is None, _score(held), str(id), id) for id, held in self.held.items() if held.ms <= self.now]
        return [id for *_, id in sorted(due)]

    def _extend(self, lease: Lease, lease_ms: int) -> None:
        mine = [held for held in self.held.values() if held.lease == lease]
        longer, count = self.queue.extend(lease, lease_ms)
        assert count == len(mine)
        assert (longer != lease) == bool(mine)
        for held in mine:
            held.ms, held.lease = self.now + lease_ms, longer
        self._learn(longer if mine else None)

    def _learn(self, lease: Lease | None) -> None:
        if lease is not None:
            assert lease not in self.leases, "a token was given out twice"
            self.leases.append(lease)

    def _any_lease(self, data: st.DataObject) -> Lease | None:
        return data.draw(st.sampled_from(self.leases[::-1])) if self.leases else None

    def _check_junk(self, reserved: LineReserved, limit: int) -> None:
        scores = self.virtual.members()
        left = self.junk & scores.keys()
        assert reserved.discarded == len(self.junk) - len(left)
        assert not any(scores[member] >= 2**53 for member in left)
        assert not left or len(reserved.entries) == limit, "junk that was due stayed"
        self.junk = left
        heads = [held.ms for held in self.held.values()] + [0 for member in left if scores[member] >= 0]
        assert reserved.next_due_ms == min(heads, default=None)


def _score(held: Held) -> int:
    return token_of(held.lease) + held.deliveries if held.lease else held.ms * 1024 + held.deliveries


def machine(client: Client, texts: Mapping[str, str] | None = None) -> type[QueueMachine]:
    """Return the state machine for one server and one set of commands."""
    members: dict[str, Any] = {"client": client, "texts": texts}
    return type("QueueMachine", (QueueMachine,), members)
