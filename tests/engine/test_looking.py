"""stats and peek: what an operator sees, without touching it."""

from __future__ import annotations

import pytest

from django_delayq.engine.engine import QueueStats
from tests.engine.virtual import VirtualQueue

pytestmark = pytest.mark.slow


def test_an_empty_queue_counts_nothing(virtual: VirtualQueue) -> None:
    assert virtual.queue.stats() == QueueStats(0, 0, 0, None, virtual.now)
    assert virtual.queue.peek() == []


def test_stats_tell_waiting_due_and_leased_apart(virtual: VirtualQueue) -> None:
    now = virtual.now
    virtual.queue.ensure([(1, now - 5), (2, now - 4)])
    virtual.queue.reserve(1, 10)
    virtual.queue.reserve(1, 50)
    virtual.queue.ensure([(3, now), (4, now + 11), (5, now + 90)])
    assert virtual.queue.stats() == QueueStats(total=5, leased=2, due=1, next_due_ms=now, now_ms=now)
    virtual.advance(10)
    assert virtual.queue.stats() == QueueStats(total=5, leased=1, due=2, next_due_ms=now, now_ms=now + 10)
    virtual.queue.remove([3, 1])
    assert virtual.queue.stats().next_due_ms == now + 11


def test_peek_shows_waiting_and_leased_entries_by_time(virtual: VirtualQueue) -> None:
    now = virtual.now
    virtual.queue.ensure([(7, now)])
    virtual.queue.reserve(1, 20)
    virtual.queue.ensure([(1, now + 30), (2, now + 10), (3, now + 40)])
    before = virtual.scores()
    assert virtual.queue.peek() == [(2, now + 10), (7, now + 20), (1, now + 30), (3, now + 40)]
    assert virtual.queue.peek(2) == [(2, now + 10), (7, now + 20)]
    assert virtual.scores() == before


def test_peek_is_bounded_and_skips_what_is_not_ours(virtual: VirtualQueue) -> None:
    virtual.client.zadd(virtual.entries, {"junk": 1, "-inf": "-inf", "inf": "inf"})
    virtual.queue.ensure([(id, virtual.now + id) for id in range(1, 700)])
    assert len(virtual.queue.peek(9999)) == 499
    assert virtual.queue.peek(3) == [(1, virtual.now + 1), (2, virtual.now + 2)]
    with pytest.raises(ValueError, match="1 or more"):
        virtual.queue.peek(0)
