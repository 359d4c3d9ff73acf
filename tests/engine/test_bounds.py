"""What the model does not reach: numbers beyond its few ids and leases, and what a command must not write."""

from __future__ import annotations

import pytest

from django_delayq.engine.engine import Engine, Lease
from tests.engine.lines import Entry, one_line
from tests.engine.virtual import START_MS, VirtualQueue

DAY_MS = 86_400_000
COUNTS = [0, 1, 999, 1000, 1001, 2001]


def leased(virtual: VirtualQueue, *ids: int) -> Lease:
    """Return a lease on exactly these ids."""
    virtual.queue.ensure([(id, virtual.now) for id in ids])
    reserved = virtual.queue.reserve(1000, 1000)
    assert {entry.id for entry in reserved.entries} == set(ids)
    assert reserved.lease is not None
    return reserved.lease


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_entries_is_added_and_removed(virtual: VirtualQueue, count: int) -> None:
    ids = range(1, count + 1)
    entries = [(id, START_MS + id) for id in ids]
    assert virtual.queue.ensure(iter(entries)) == count
    assert virtual.waiting() == dict(entries)
    assert virtual.queue.ensure(entries) == 0
    virtual.queue.ensure([(5000, START_MS)])
    assert virtual.queue.remove(iter([*ids, 6000])) == count
    assert list(virtual.scores()) == [5000]


def test_of_one_id_that_is_given_twice_the_earliest_time_counts(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, 900)])
    virtual.queue.ensure([(1, 500), (1, 300), (1, 400), (2, 8), (2, 9), (2, 6), (2, 7)])
    assert virtual.waiting() == {1: 300, 2: 6}


def test_ensure_keeps_the_count_of_deliveries(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.queue.reserve(1, 10)
    virtual.advance(10)
    again = virtual.queue.reserve(1, 10)
    assert again.lease is not None
    virtual.queue.release(again.lease, [(1, virtual.now + 100)])
    virtual.queue.ensure([(1, virtual.now)])
    assert virtual.queue.reserve(1, 10).entries == (Entry(1, 2),)


def test_ensure_takes_an_entry_back_from_a_lease_that_ends_later_than_any_may(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now), (2, virtual.now)])
    virtual.advance(30 * DAY_MS)
    virtual.queue.reserve(1, 1000)
    virtual.queue.reserve(1, DAY_MS)
    virtual.advance(-30 * DAY_MS)  # the clock of the server is corrected
    assert virtual.queue.ensure([(1, START_MS + 5), (2, START_MS + 5)]) == 2
    assert virtual.waiting() == {1: START_MS + 5, 2: START_MS + 5}
    assert virtual.queue.ensure([(1, 0), (2, 0)]) == 2
    virtual.queue.reserve(2, DAY_MS)
    assert virtual.queue.ensure([(1, 0), (2, 0)]) == 0, "these are the longest that may be"


def test_a_lease_that_ends_later_than_any_may_is_honored_by_neither_reserve_nor_ensure(virtual: VirtualQueue) -> None:
    queue = one_line(Engine(virtual.client, caller=virtual.queue.queue._caller, longest_lease_ms=1000))
    queue.ensure([(1, virtual.now), (2, virtual.now), (3, virtual.now)])
    assert queue.reserve(3, 1000).lease is not None
    assert not queue.reserve(3, 1000).entries, "this one is the longest that may be"
    virtual.advance(-2)  # the clock of the server is corrected
    assert [entry.deliveries for entry in queue.reserve(2, 500).entries] == [2, 2]
    assert queue.ensure([(id, virtual.now - 10) for id in (1, 2, 3)]) == 1, "that of the third one"


def test_ensure_brings_back_an_entry_whose_score_is_out_of_this_world(virtual: VirtualQueue) -> None:
    virtual.client.zadd(virtual.entries, {"1": "inf", "2": "1e300", "3": 2**53})
    assert virtual.queue.ensure([(1, 10), (2, 10), (3, 10)]) == 3
    assert virtual.waiting() == {1: 10, 2: 10, 3: 10}


def test_nothing_is_published_while_the_head_stays_or_moves_later(virtual: VirtualQueue) -> None:
    queue = virtual.queue
    queue.ensure([(1, 500)])
    virtual.wakes()
    queue.ensure([(1, 500), (2, 500), (3, 600)])
    queue.reschedule([(1, 800), (2, 700), (3, 600)])
    queue.remove([3])
    assert virtual.wakes() == []


def test_a_released_head_is_published(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now), (2, virtual.now + 50)])
    lease = virtual.queue.reserve(1, 1000).lease
    virtual.wakes()
    assert lease is not None
    virtual.queue.release(lease, [(1, virtual.now + 49)])
    assert virtual.wakes() == [virtual.now + 49]


def test_an_empty_queue_gives_no_lease_and_nothing_is_written(virtual: VirtualQueue) -> None:
    reserved = virtual.queue.reserve(10, 1000)
    assert (reserved.lease, reserved.entries, reserved.next_due_ms, reserved.discarded) == (None, (), None, 0)
    assert virtual.client.exists(virtual.queue.keys.counter) == 0


def test_a_probe_touches_no_entry_not_even_one_of_1970(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, 0), (2, virtual.now)])
    virtual.queue.reserve(1, 1000)
    before = virtual.snapshot()
    virtual.queue.probe()
    assert virtual.snapshot() == before


@pytest.mark.parametrize("asked", [1000, 1001, 5000])
def test_never_more_than_a_thousand_at_once(virtual: VirtualQueue, asked: int) -> None:
    virtual.queue.ensure([(id, virtual.now) for id in range(1, 2501)])
    found = [{entry.id for entry in virtual.queue.reserve(asked, 1000).entries} for _ in range(4)]
    assert list(map(len, found)) == [1000, 1000, 500, 0]
    assert set[int]().union(*found) == set(range(1, 2501))


@pytest.mark.parametrize("count", [999, 1000])
def test_a_full_lease_is_acknowledged_released_and_extended_whole(virtual: VirtualQueue, count: int) -> None:
    ids = range(1, count + 1)
    lease, extended = virtual.queue.extend(leased(virtual, *ids), 5000)
    assert extended == count
    assert virtual.queue.release(lease, [(id, virtual.now) for id in ids]) == count
    assert virtual.queue.acknowledge(leased(virtual, *ids)) == count
    assert virtual.queue.acknowledge(leased(virtual, *ids), ids) == count


def test_no_ids_are_nothing_to_acknowledge_or_release(virtual: VirtualQueue) -> None:
    lease = leased(virtual, 1)
    assert virtual.queue.acknowledge(lease, []) == virtual.queue.release(lease, []) == 0
    assert list(virtual.scores()) == [1]


def test_of_a_lease_that_is_extended_twice_in_one_millisecond_only_the_last_one_holds(virtual: VirtualQueue) -> None:
    first = leased(virtual, 1)
    second, _ = virtual.queue.extend(first, 1000)
    third, _ = virtual.queue.extend(second, 1000)
    assert len({first, second, third}) == 3
    for stale in (first, second):
        assert virtual.queue.acknowledge(stale) == virtual.queue.release(stale, [(1, 0)]) == 0
        assert virtual.queue.extend(stale, 1000) == (stale, 0)
    assert virtual.queue.acknowledge(third) == 1


def test_an_extended_lease_keeps_the_count_of_deliveries(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.queue.reserve(1, 1)
    virtual.advance(1)
    lease = virtual.queue.reserve(1, 1).lease
    assert lease is not None
    virtual.queue.extend(lease, 5)
    virtual.advance(5)
    assert virtual.queue.reserve(1, 1).entries == (Entry(1, 3),)


def test_entries_of_every_delivery_count_belong_to_their_lease(virtual: VirtualQueue) -> None:
    for id in range(1, 17):
        virtual.queue.ensure([(id, virtual.now)])
        virtual.queue.reserve(1000, 1)
        virtual.advance(1)
    reserved = virtual.queue.reserve(1000, 1000)
    assert sorted(entry.deliveries for entry in reserved.entries) == [*range(2, 16), 15, 15]
    assert reserved.lease is not None
    lease, count = virtual.queue.extend(reserved.lease, 2000)
    assert count == 16
    assert virtual.queue.acknowledge(lease, range(1, 9)) == 8
    assert virtual.queue.acknowledge(lease) == 8


def test_six_hundred_leases_in_one_millisecond_all_differ(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(id, virtual.now) for id in range(1, 641)])
    leases = [virtual.queue.reserve(1, 1000).lease for _ in range(640)]
    assert len(set(leases)) == 640
    for lease in leases:
        assert lease is not None
        assert virtual.queue.acknowledge(lease) == 1


def test_a_foreign_value_of_the_counter_does_no_harm(virtual: VirtualQueue) -> None:
    for id, value in enumerate(["nan", "inf", "-1", "1e9", "99", "", "x" * 1000, str(2**63)], start=1):
        virtual.client.set(virtual.queue.keys.counter, value)
        virtual.queue.ensure([(id, virtual.now)])
        lease = virtual.queue.reserve(1, 1000).lease
        assert lease is not None
        assert virtual.queue.acknowledge(lease) == 1


def test_peek_is_bounded_and_skips_what_is_not_ours(virtual: VirtualQueue) -> None:
    virtual.client.zadd(virtual.entries, {"junk": 1, "-inf": "-inf", "inf": "inf"})
    virtual.queue.ensure([(id, virtual.now + id) for id in range(1, 700)])
    assert len(virtual.queue.peek(9999)) == 499
    assert virtual.queue.peek(3) == [(1, virtual.now + 1), (2, virtual.now + 2)]
    with pytest.raises(ValueError, match="1 or more"):
        virtual.queue.peek(0)


@pytest.mark.parametrize(
    ("limit", "lease_ms", "ahead_ms"),
    [(0, 1, 0), (-1, 1, 0), (1, 0, 0), (1, DAY_MS + 1, 0), (1, 1000, -1), (1, 1000, 1001)],
)
def test_what_a_reserve_asks_for_is_bounded(virtual: VirtualQueue, limit: int, lease_ms: int, ahead_ms: int) -> None:
    with pytest.raises(ValueError, match=r"is 1 or more|1 ms to 24 hours|ahead"):
        virtual.queue.reserve(limit, lease_ms, ahead_ms)


def test_deliveries_are_counted_up_to_fifteen(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    counts = []
    for _ in range(17):
        counts += [entry.deliveries for entry in virtual.queue.reserve(1, 1).entries]
        virtual.advance(1)
    assert counts == [*range(1, 16), 15, 15]
    assert virtual.queue.reserve(1, 1).entries == (Entry(1, 15),)
