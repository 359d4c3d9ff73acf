"""Lines: only those that a caller names are touched, and their heads lead to all the others."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from tests.engine.lines import LINE
from tests.engine.virtual import VirtualQueue

pytestmark = pytest.mark.slow

DAY_MS = 86_400_000


def heads_of(virtual: VirtualQueue) -> dict[str, float]:
    """Return the heads as Redis has them, by the quoted names of their lines."""
    found = virtual.client.zrange(virtual.queue.keys.heads, 0, -1, withscores=True)
    return {name.decode(): score for name, score in found}


def test_the_heads_of_named_lines_are_found_behind_any_number_of_others(virtual: VirtualQueue) -> None:
    queue, now = virtual.queue.queue, virtual.now
    virtual.client.zadd(queue.keys.heads, {f"x{number}": number for number in range(1500)})
    virtual.client.zadd(queue.keys.heads, {"past": "-inf", "never": "inf", "half": now + 0.5})
    names = [f"line {number}" for number in range(1200)]
    for id, due in enumerate((now, now + 1000, now + 1001), start=1):
        queue.ensure(names[400 * id - 1], [(id, due)])
    assert queue.reserve({}, 1, named=[*names, "past", "never", "half", "none"]).heads == {
        names[399]: now, names[799]: now + 1000, "past": 0, "half": now
    }  # fmt: skip
    reserved = queue.reserve(dict.fromkeys(names[300:500], 1), 700, named=names)
    assert [entry.id for entry in reserved.entries] == [1]
    assert reserved.heads == {names[399]: now + 700, names[799]: now + 1000}, "as they are after it"


def test_many_lines_are_asked_together_by_several_commands_of_a_hundred_lines(virtual: VirtualQueue) -> None:
    queue, now = virtual.queue.queue, virtual.now
    lines = [f"line {number}" for number in range(250)]
    for id, line in enumerate(lines, start=1):
        queue.ensure(line, [(id, now)])
    reserved = queue.reserve(dict.fromkeys(lines, 5), 500)
    assert [(entry.id, entry.line) for entry in reserved.entries] == list(enumerate(lines, start=1))
    assert reserved.heads == dict.fromkeys(lines, now + 500)
    assert queue.stats()[:4] == (250, 250, 0, now + 500)
    assert reserved.lease is not None
    assert queue.acknowledge(reserved.lease) == 250
    assert queue.reserve({}, 1).heads == {}


def test_forged_heads_are_corrected_and_foreign_ones_removed(virtual: VirtualQueue) -> None:
    queue = virtual.queue.queue
    queue.ensure(LINE, [(1, virtual.now)])
    for score in ["-inf", "-1", "0.5", "1e300", "inf"]:
        forged = [LINE, "gone", b"\xff", "x y", "a" * 3001, "ü"]
        virtual.client.zadd(virtual.queue.keys.heads, dict.fromkeys(forged, score))
        assert queue.reserve({}, 1).heads in ({LINE: 0, "gone": 0}, {})
        queue.correct_heads()
        assert heads_of(virtual) == {LINE: virtual.now}


def test_a_line_ends_by_itself_a_day_or_two_after_its_last_entry_was_due(virtual: VirtualQueue) -> None:
    queue, keys = virtual.queue.queue, virtual.queue.keys
    for add in (queue.ensure, queue.reschedule):
        for due, least in [(0, 0), (virtual.now, 0), (virtual.now + 10 * DAY_MS, 10 * DAY_MS)]:
            add(LINE, [(1, due), (2, 0)])
            for key in (keys.heads, virtual.entries):
                assert least + DAY_MS - 60_000 < virtual.client.pttl(key) <= least + 2 * DAY_MS
        virtual.client.delete(keys.heads, virtual.entries)
    queue.ensure(LINE, [(1, virtual.now)])
    for left, is_renewed in [(DAY_MS + 60_000, False), (DAY_MS - 1, True)]:
        virtual.client.pexpire(virtual.entries, left)
        queue.ensure(LINE, [(2 + is_renewed, virtual.now)])
        assert (virtual.client.pttl(virtual.entries) > left) == is_renewed, "once a day only"


def test_foreign_heads_stop_no_command_half_way(virtual: VirtualQueue) -> None:
    queue, keys, client = virtual.queue.queue, virtual.queue.keys, virtual.client
    acts: list[tuple[Any, list[Any], bool]] = [
        (queue.ensure, [(1, virtual.now)], False), (queue.reschedule, [(1, virtual.now)], False),
        (queue.remove, [1], True), (queue.acknowledge, [1], True),
    ]  # fmt: skip
    for act, items, is_there in acts:
        client.delete(keys.heads, virtual.entries)
        first: Any = LINE
        if is_there:
            queue.ensure(LINE, [(1, 0), (2, 0)])
        if act == queue.acknowledge:
            first = queue.reserve({LINE: 1000}, 60_000).lease
        virtual.wakes()
        client.delete(keys.heads)
        client.set(keys.heads, "mine")
        assert act(first, items) == 1
        assert list(heads_of(virtual)) == [LINE]
        assert bool(virtual.wakes()) == (not is_there)


def test_changes_of_several_lines_keep_the_order_of_each(client: redis.Redis) -> None:
    engine = Engine(client)
    queue = engine.queue("q", 0)
    engine.apply([Change("q", "a", 1, 50), Change("q", "a", 1, 30, True), Change("q", "a", 1, 45, True)])
    assert queue.peek() == [(1, 30)]
    engine.apply([Change("q", "a", 1, 50), Change("q", "b", 1, 40), Change("q", "a", 1, None), Change("q", "b", 2, 5)])
    assert (queue.peek(9, "a"), queue.peek(9, "b"), queue.peek()) == ([], [(2, 5), (1, 40)], [(2, 5), (1, 40)])
    assert (queue.stats_of("a").total, queue.stats_of("b").total, queue.stats().total) == (0, 2, 2)
