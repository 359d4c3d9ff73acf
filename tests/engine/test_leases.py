"""acknowledge, release and extend: what a lease may do, and what a stale one may not."""

from __future__ import annotations

import pytest

from django_delayq.engine.engine import Lease
from tests.engine.lines import Entry, token_of
from tests.engine.virtual import VirtualQueue

pytestmark = pytest.mark.slow


def leased(virtual: VirtualQueue, *ids: int, lease_ms: int = 1000) -> Lease:
    """Return a lease on exactly these ids."""
    virtual.queue.ensure([(id, virtual.now) for id in ids])
    reserved = virtual.queue.reserve(1000, lease_ms)
    assert {entry.id for entry in reserved.entries} == set(ids)
    assert reserved.lease is not None
    return reserved.lease


def test_single_ids_are_acknowledged(virtual: VirtualQueue) -> None:
    lease = leased(virtual, 1, 2, 3)
    assert virtual.queue.acknowledge(lease, [1, 3, 99]) == 2
    assert list(virtual.scores()) == [2]


def test_the_whole_lease_is_acknowledged_and_nothing_else(virtual: VirtualQueue) -> None:
    before, lease, after = leased(virtual, 1, 2), leased(virtual, 3, 4), leased(virtual, 5)
    virtual.queue.ensure([(6, 0)])
    assert virtual.queue.acknowledge(lease) == 2
    assert set(virtual.scores()) == {1, 2, 5, 6}
    assert virtual.queue.acknowledge(before) == 2
    assert virtual.queue.acknowledge(after) == 1


def test_no_ids_acknowledge_nothing(virtual: VirtualQueue) -> None:
    lease = leased(virtual, 1)
    assert virtual.queue.acknowledge(lease, []) == 0
    assert virtual.queue.release(lease, []) == 0
    assert list(virtual.scores()) == [1]


def test_entries_of_every_delivery_count_belong_to_their_lease(virtual: VirtualQueue) -> None:
    for id in range(1, 17):
        virtual.queue.ensure([(id, virtual.now)])
        virtual.queue.reserve(1000, 1)
        virtual.advance(1)
    reserved = virtual.queue.reserve(1000, 1000)
    assert sorted({entry.deliveries for entry in reserved.entries}) == list(range(2, 16))
    assert reserved.lease is not None
    lease, count = virtual.queue.extend(reserved.lease, 2000)
    assert count == 16
    assert virtual.queue.acknowledge(lease, range(1, 9)) == 8
    assert virtual.queue.acknowledge(lease) == 8


def test_a_probe_touches_no_entry_not_even_one_of_1970(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, 0), (2, virtual.now)])
    virtual.queue.reserve(1, 1000)
    before = virtual.snapshot()
    virtual.queue.probe()
    assert virtual.snapshot() == before


@pytest.mark.parametrize("count", [999, 1000])
def test_a_full_lease_is_acknowledged_released_and_extended_whole(virtual: VirtualQueue, count: int) -> None:
    ids = range(1, count + 1)
    lease, extended = virtual.queue.extend(leased(virtual, *ids), 5000)
    assert extended == count
    assert virtual.queue.release(lease, [(id, virtual.now) for id in ids]) == count
    assert virtual.queue.acknowledge(leased(virtual, *ids)) == count
    assert virtual.queue.acknowledge(leased(virtual, *ids), ids) == count


def test_a_lapsed_lease_still_acknowledges_what_nobody_took(virtual: VirtualQueue) -> None:
    lease = leased(virtual, 1, 2)
    virtual.advance(5000)
    assert virtual.queue.acknowledge(lease, [1]) == 1
    assert virtual.queue.reserve(1, 1000).entries == (Entry(2, 2),)
    assert virtual.queue.acknowledge(lease) == 0


def test_a_stale_lease_acknowledges_releases_and_extends_nothing(virtual: VirtualQueue) -> None:
    stale = leased(virtual, 1, 2)
    virtual.advance(1000)
    fresh = virtual.queue.reserve(10, 1000).lease
    before = virtual.scores()
    assert virtual.queue.acknowledge(stale) == 0
    assert virtual.queue.acknowledge(stale, [1, 2]) == 0
    assert virtual.queue.release(stale, [(1, 0), (2, 0)]) == 0
    assert virtual.queue.extend(stale, 9000) == (stale, 0)
    assert virtual.scores() == before
    assert fresh is not None
    assert virtual.queue.acknowledge(fresh) == 2


def test_a_rescheduled_entry_is_out_of_its_old_lease(virtual: VirtualQueue) -> None:
    lease = leased(virtual, 1)
    virtual.queue.reschedule([(1, token_of(lease) // 1024 % 2**42)])  # due exactly when the lease would have ended
    assert virtual.queue.acknowledge(lease) == 0
    assert virtual.queue.release(lease, [(1, 0)]) == 0
    assert virtual.queue.extend(lease, 5)[1] == 0
    assert list(virtual.scores()) == [1]


def test_a_released_entry_waits_for_its_new_time_and_its_delivery_is_not_counted(virtual: VirtualQueue) -> None:
    lease = leased(virtual, 1, 2)
    assert virtual.queue.release(lease, [(1, virtual.now + 5), (99, 0)]) == 1
    assert virtual.waiting() == {1: virtual.now + 5}
    assert virtual.queue.acknowledge(lease) == 1
    virtual.advance(5)
    assert virtual.queue.reserve(5, 1000).entries == (Entry(1, 1),)


def test_releasing_takes_back_one_delivery_and_not_those_before(virtual: VirtualQueue) -> None:
    leased(virtual, 1, lease_ms=1)
    virtual.advance(1)
    lease = virtual.queue.reserve(1, 1).lease
    virtual.advance(1)
    third = virtual.queue.reserve(1, 1)
    assert third.entries == (Entry(1, 3),)
    assert lease is not None
    assert third.lease is not None
    virtual.queue.release(third.lease, [(1, virtual.now)])
    assert virtual.queue.reserve(1, 1).entries == (Entry(1, 3),)


def test_an_extended_lease_ends_later_and_the_old_one_is_stale(virtual: VirtualQueue) -> None:
    old = leased(virtual, 1, 2)
    virtual.advance(900)
    new, count = virtual.queue.extend(old, 1000)
    assert (count, new == old) == (2, False)
    assert virtual.queue.acknowledge(old) == 0
    virtual.advance(999)
    assert virtual.queue.reserve(5, 1000).entries == ()
    virtual.advance(1)
    assert virtual.queue.reserve(5, 1000).entries == (Entry(1, 2), Entry(2, 2))
    assert virtual.queue.acknowledge(new) == 0


def test_extending_twice_in_one_millisecond_gives_two_leases(virtual: VirtualQueue) -> None:
    first = leased(virtual, 1)
    second, _ = virtual.queue.extend(first, 1000)
    third, _ = virtual.queue.extend(second, 1000)
    assert len({first, second, third}) == 3
    assert virtual.queue.acknowledge(second) == 0
    assert virtual.queue.acknowledge(third) == 1


def test_an_extended_lease_keeps_the_count_of_deliveries(virtual: VirtualQueue) -> None:
    leased(virtual, 1, lease_ms=1)
    virtual.advance(1)
    second = virtual.queue.reserve(1, 1)
    assert second.lease is not None
    virtual.queue.extend(second.lease, 5)
    virtual.advance(5)
    assert virtual.queue.reserve(1, 1).entries == (Entry(1, 3),)


def test_a_lease_never_reaches_its_neighbours_of_the_same_millisecond(virtual: VirtualQueue) -> None:
    before, lease, after = leased(virtual, 1), leased(virtual, 2), leased(virtual, 3)
    assert token_of(after) - token_of(lease) == token_of(lease) - token_of(before) == 16
    for act in [
        lambda: virtual.queue.acknowledge(lease, [1, 3]),
        lambda: virtual.queue.release(lease, [(1, 0), (3, 0)]),
        lambda: virtual.queue.extend(lease, 1000)[1] - 1,
    ]:
        assert act() == 0
    assert (virtual.queue.acknowledge(before), virtual.queue.acknowledge(after)) == (1, 1)
