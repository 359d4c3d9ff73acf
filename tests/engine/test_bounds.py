"""What the model does not reach: numbers beyond its few ids and leases, and what a command must not write."""

from __future__ import annotations

import pytest

from django_delayq.engine.engine import Engine
from tests.engine.lines import Entry, one_line
from tests.engine.virtual import START_MS, VirtualQueue

DAY_MS = 86_400_000


def test_of_one_id_that_is_given_twice_the_earliest_time_counts(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, 900)])
    virtual.queue.ensure([(1, 500), (1, 300), (1, 400), (2, 8), (2, 9), (2, 6), (2, 7)])
    assert virtual.waiting() == {1: 300, 2: 6}


def test_a_lease_that_ends_later_than_any_may_is_honored_by_neither_reserve_nor_ensure(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.advance(30 * DAY_MS)
    virtual.queue.reserve(1, 1000)
    virtual.advance(-30 * DAY_MS)  # the clock of the server is corrected
    assert virtual.queue.ensure([(1, START_MS + 5)]) == 1
    assert virtual.waiting() == {1: START_MS + 5}
    virtual.queue.remove([1])
    queue = one_line(Engine(virtual.client, caller=virtual.queue.queue._caller, longest_lease_ms=1000))
    queue.ensure([(1, virtual.now), (2, virtual.now), (3, virtual.now)])
    assert queue.reserve(3, 1000).lease is not None
    assert not queue.reserve(3, 1000).entries and not queue.ensure([(1, 0)]), "this one is the longest that may be"
    virtual.advance(-2)
    assert [entry.deliveries for entry in queue.reserve(2, 500).entries] == [2, 2]
    assert queue.ensure([(id, virtual.now - 10) for id in (1, 2, 3)]) == 1, "that of the third one"


def test_a_message_is_sent_when_the_head_moves_forward_and_only_then(virtual: VirtualQueue) -> None:
    queue, now = virtual.queue, virtual.now
    queue.ensure([(1, now), (4, now + 50)])
    lease = queue.reserve(1, 1000).lease
    virtual.wakes()
    assert lease is not None
    queue.release(lease, [(1, now + 49)])
    assert virtual.wakes() == [now + 49]
    queue.ensure([(1, now + 49), (2, now + 49), (3, now + 60)])
    queue.reschedule([(1, now + 80), (2, now + 70)])
    queue.remove([3])
    assert virtual.wakes() == []


def test_deliveries_are_counted_up_to_fifteen_and_stay_within_their_lease(virtual: VirtualQueue) -> None:
    for id in range(1, 17):
        virtual.queue.ensure([(id, virtual.now)])
        virtual.queue.reserve(1000, 1)
        virtual.advance(1)
    reserved = virtual.queue.reserve(1000, 1000)
    assert sorted(entry.deliveries for entry in reserved.entries) == [*range(2, 16), 15, 15]
    assert reserved.lease is not None
    lease, count = virtual.queue.extend(reserved.lease, 2000)
    assert count == 16
    assert virtual.queue.release(lease, [(15, virtual.now + 100)]) == 1
    virtual.queue.ensure([(15, virtual.now)])
    assert virtual.queue.reserve(1, 1000).entries == (Entry(15, 3),), "no extension, release or ensure counts"
    assert virtual.queue.acknowledge(lease, range(1, 9)) == 8
    assert virtual.queue.acknowledge(lease) == 7


def test_of_a_lease_that_is_extended_twice_in_one_millisecond_only_the_last_one_holds(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    first = virtual.queue.reserve(1, 1000).lease
    assert first is not None
    second, _ = virtual.queue.extend(first, 1000)
    third, _ = virtual.queue.extend(second, 1000)
    assert len({first, second, third}) == 3
    for stale in (first, second):
        assert virtual.queue.acknowledge(stale) == virtual.queue.release(stale, [(1, 0)]) == 0
        assert virtual.queue.extend(stale, 1000) == (stale, 0)
    assert virtual.queue.acknowledge(third) == 1


def test_six_hundred_leases_in_one_millisecond_all_differ(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(id, virtual.now) for id in range(1, 641)])
    leases = [virtual.queue.reserve(1, 1000).lease for _ in range(640)]
    assert len(set(leases)) == 640
    assert [virtual.queue.acknowledge(lease) for lease in leases if lease] == [1] * 640


def test_what_is_asked_for_and_shown_is_bounded(virtual: VirtualQueue) -> None:
    virtual.client.zadd(virtual.entries, {"junk": 1, "-inf": "-inf", "inf": "inf"})
    virtual.queue.ensure([(id, virtual.now + id) for id in range(1, 700)])
    assert len(virtual.queue.peek(9999)) == 499
    assert virtual.queue.peek(3) == [(1, virtual.now + 1), (2, virtual.now + 2)], "without what is not ours"
    with pytest.raises(ValueError, match="1 or more"):
        virtual.queue.peek(0)
    for wrong in [(0, 1, 0), (-1, 1, 0), (1, 0, 0), (1, DAY_MS + 1, 0), (1, 1000, -1), (1, 1000, 1001)]:
        with pytest.raises(ValueError, match=r"is 1 or more|1 ms to 24 hours|ahead"):
            virtual.queue.reserve(*wrong)
