"""Several lines of one queue as dicts, run beside the real ones by Hypothesis: what heads and limits mean.

What the entries of one line do is `model`'s; here leases span lines, and heads are lost, forged and restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from django_delayq.engine.engine import Lease
from django_delayq.engine.scripts import Client
from tests.engine.model import LEASE_MS, PAIRS, Held
from tests.engine.virtual import VirtualQueue

NAMES = ["shop.Order.pay", "a b", "n", "%"]
LINES = st.sampled_from(NAMES)
LIMITS = st.dictionaries(LINES, st.sampled_from([1, 2, 1000]), max_size=4)
SCORES = st.sampled_from(["-inf", "inf", "-5", "0", "0.5", "1700000000000", "1e300"])
HEADS_MS = 1000


class LinesMachine(RuleBasedStateMachine):
    """Every command on several lines, and everything that may happen to the heads."""

    client: ClassVar[Any]
    texts: ClassVar[Mapping[str, str] | None] = None

    @initialize()
    def begin(self) -> None:
        self.client.flushdb()
        self.virtual = VirtualQueue(self.client, self.texts)
        self.queue = self.virtual.queue.queue
        self.held: dict[str, dict[int, Held]] = {name: {} for name in NAMES}
        self.leases: list[Lease] = []
        self.wrong: set[str] = set()
        """The lines whose head need not be right until a command changes them."""
        self.believed = dict.fromkeys(NAMES, 0)
        """When a waiting worker will ask each line again."""

    @property
    def now(self) -> int:
        return self.virtual.now

    @rule(line=LINES, pairs=PAIRS, earlier_only=st.booleans())
    def push(self, line: str, pairs: list[tuple[int, int]], earlier_only: bool) -> None:
        wanted = [(id, self.now + offset) for id, offset in pairs]
        for id, due in wanted:
            held = self.held[line].get(id)
            if not earlier_only or held is None:
                self.held[line][id] = Held(due)
            elif held.lease is None:
                held.ms = min(held.ms, due)
        (self.queue.ensure if earlier_only else self.queue.reschedule)(line, wanted)
        self.wrong.discard(line)

    @rule(line=LINES, ids=st.lists(st.integers(1, 7), min_size=1, max_size=3, unique=True))
    def remove(self, line: str, ids: list[int]) -> None:
        present = [id for id in ids if self.held[line].pop(id, None)]
        assert self.queue.remove(line, ids) == len(present)
        self.wrong.discard(line)

    @rule(limits=LIMITS, lease_ms=LEASE_MS)
    def reserve(self, limits: dict[str, int], lease_ms: int) -> None:
        expected = [(id, line) for line, limit in limits.items() for id in self._reservable(line)[:limit]]
        reserved = self.queue.reserve(limits, lease_ms)
        assert [(entry.id, entry.line) for entry in reserved.entries] == expected
        for id, _, line in reserved.entries:
            held = self.held[line][id]
            self.held[line][id] = Held(self.now + lease_ms, held.deliveries + 1, reserved.lease)
        if reserved.lease is not None:
            assert reserved.lease not in self.leases
            self.leases.append(reserved.lease)
        self.wrong -= limits.keys()
        soon = {line: ms for line in NAMES if (ms := self._head(line)) is not None and ms <= self.now + HEADS_MS}
        right = {line: ms for line, ms in reserved.heads.items() if line not in self.wrong}
        assert right == {line: ms for line, ms in soon.items() if line not in self.wrong}
        # Of a line whose head was lost it learns with the next reserve, at most a second later.
        self.believed = {
            line: 0 if line in self.wrong else reserved.heads.get(line, self.now + HEADS_MS) for line in NAMES
        }
        self.virtual.wakes()

    @rule(data=st.data(), what=st.sampled_from(["acknowledge", "release", "extend"]), some=st.booleans())
    def use_lease(self, data: st.DataObject, what: str, some: bool) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases[::-1]))
        mine = [(line, id) for line in NAMES for id, held in self.held[line].items() if held.lease == lease]
        picked = [id for _, id in mine if id % 2] if some else [id for _, id in mine]
        mine = [(line, id) for line, id in mine if id in picked and lease.lines.get(id) == line]
        if what == "acknowledge":
            assert self.queue.acknowledge(lease, picked) == len(mine)
            for line, id in mine:
                del self.held[line][id]
        elif what == "release":
            assert self.queue.release(lease, [(id, self.now + 5) for id in picked]) == len(mine)
            for line, id in mine:
                self.held[line][id] = Held(self.now + 5, self.held[line][id].deliveries - 1)
        else:
            mine = [(line, id) for line in NAMES for id, held in self.held[line].items() if held.lease == lease]
            longer, count = self.queue.extend(lease, 7)
            assert count == len(mine)
            for line, id in mine:
                self.held[line][id] = Held(self.now + 7, self.held[line][id].deliveries, longer)
            if mine:
                self.leases.append(longer)
        self.wrong -= {line for line, _ in mine}

    @rule(ms=st.sampled_from([1, 2, 999, 1000, -1000]))
    def advance(self, ms: int) -> None:
        self.virtual.advance(ms)
        if ms < 0:  # a worker waits by the steady clock of its process
            self.believed = dict.fromkeys(NAMES, 0)

    @rule(names=st.lists(LINES, unique=True), score=SCORES)
    def forge_heads(self, names: list[str], score: str) -> None:
        for name in names:
            self.client.zadd(self.queue.keys.heads, {self.queue.keys.line(name).rpartition(":")[2]: score})
        self.client.zadd(self.queue.keys.heads, {"x y": score, "\u0967": score, b"\xff": score, "a" * 4000: score})
        self.wrong |= set(names)

    @rule()
    def lose_heads(self) -> None:
        self.client.delete(self.queue.keys.heads)
        self.wrong |= set(NAMES)

    @rule(line=LINES)
    def lose_a_line(self, line: str) -> None:
        self.client.delete(self.queue.keys.line(line))
        self.held[line].clear()
        self.wrong.add(line)

    @rule()
    def correct_heads(self) -> None:
        """What lost its head altogether waits for the next ensure."""
        with_head = {bytes(name) for name in self.client.zrange(self.queue.keys.heads, 0, -1)}
        self.queue.correct_heads()
        self.wrong -= {line for line in NAMES if self.queue.keys.line(line).rpartition(":")[2].encode() in with_head}
        left: Any = self.client.zrange(self.queue.keys.heads, 0, -1)
        assert {self.queue.keys.named(name.decode()) for name in left} <= {self.queue.keys.line(line) for line in NAMES}

    @invariant()
    def heads_say_what_the_entries_say(self) -> None:
        if hasattr(self, "held"):
            found = dict(self.client.zrange(self.queue.keys.heads, 0, -1, withscores=True))
            for line in set(NAMES) - self.wrong:
                name = self.queue.keys.line(line).rpartition(":")[2].encode()
                assert found.get(name) == self._head(line), line

    @invariant()
    def a_waiting_worker_knows_of_everything_earlier_in_each_line(self) -> None:
        if hasattr(self, "held"):
            if said := self.virtual.wakes():  # a message ends the wait for all lines
                self.believed = {line: min(ms, *said, 0) for line, ms in self.believed.items()}
            for line in NAMES:
                waiting = [held.ms for held in self.held[line].values() if held.lease is None]
                assert line in self.wrong or not waiting or self.believed[line] <= max(min(waiting), self.now)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "held") and not self.wrong:
            assert self.queue.stats().total == sum(map(len, self.held.values()))
            shown = sorted(ms for held in self.held.values() for ms in (each.ms for each in held.values()))
            assert [ms for _, ms in self.queue.peek()] == shown

    def _head(self, line: str) -> int | None:
        return min((held.ms for held in self.held[line].values()), default=None)

    def _reservable(self, line: str) -> list[int]:
        due = [(id, held) for id, held in self.held[line].items() if held.ms <= self.now]
        return [id for id, _ in sorted(due, key=lambda each: self._order(line, *each))]

    def _order(self, line: str, id: int, held: Held) -> tuple[Any, ...]:
        score = dict(held.lease.tokens)[line] if held.lease else held.ms
        return held.lease is None, score, held.deliveries, str(id)


def machine(client: Client, texts: Mapping[str, str] | None = None) -> type[LinesMachine]:
    """Return the state machine for one server and one set of commands."""
    members: dict[str, Any] = {"client": client, "texts": texts}
    return type("LinesMachine", (LinesMachine,), members)
