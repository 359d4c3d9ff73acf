"""reserve: who gets what, in which order, for how long."""

from __future__ import annotations

import pytest

from tests.engine.lines import Entry
from tests.engine.virtual import VirtualQueue

pytestmark = pytest.mark.slow


def test_an_empty_queue_gives_no_lease_and_no_next_time(virtual: VirtualQueue) -> None:
    reserved = virtual.queue.reserve(10, 1000)
    assert (reserved.lease, reserved.entries, reserved.next_due_ms, reserved.discarded) == (None, (), None, 0)
    assert reserved.now_ms == virtual.now
    assert virtual.client.exists(virtual.queue.keys.counter) == 0, "an idle worker writes nothing"


def test_an_entry_is_due_in_its_own_millisecond_and_not_before(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now + 1)])
    early = virtual.queue.reserve(10, 1000)
    assert (early.entries, early.next_due_ms) == ((), virtual.now + 1)
    virtual.advance(1)
    assert virtual.queue.reserve(10, 1000).entries == (Entry(1, 1),)


def test_who_asks_ahead_gets_what_falls_due_within_that_time_and_not_later(virtual: VirtualQueue) -> None:
    now = virtual.now
    virtual.queue.ensure([(1, now + 3), (2, now + 4), (3, now)])
    ahead = virtual.queue.reserve(10, 1000, 3)
    assert ahead.entries == (Entry(3, 1), Entry(1, 1))
    assert (ahead.now_ms, ahead.next_due_ms) == (now, now + 4)
    virtual.advance(999)
    assert [entry.id for entry in virtual.queue.reserve(10, 1000).entries] == [2], "its lease counts from now"
    virtual.advance(1)
    assert {entry.id for entry in virtual.queue.reserve(10, 1000).entries} == {1, 3}


def test_leases_of_others_are_not_given_out_ahead(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.queue.reserve(1, 10)
    assert virtual.queue.reserve(1, 1000, 10).entries == ()


@pytest.mark.parametrize("ahead_ms", [-1, 1001])
def test_time_ahead_is_bounded(virtual: VirtualQueue, ahead_ms: int) -> None:
    with pytest.raises(ValueError, match="ahead"):
        virtual.queue.reserve(1, 1000, ahead_ms)


def test_the_earliest_come_first_and_the_limit_holds(virtual: VirtualQueue) -> None:
    now = virtual.now
    virtual.queue.ensure([(1, now), (2, now - 2), (3, now - 1), (4, now + 1)])
    first = virtual.queue.reserve(2, 1000)
    assert [entry.id for entry in first.entries] == [2, 3]
    assert first.next_due_ms == now
    second = virtual.queue.reserve(2, 1000)
    assert [entry.id for entry in second.entries] == [1]
    assert second.next_due_ms == now + 1


def test_a_lapsed_lease_is_given_out_before_what_is_waiting(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.queue.reserve(1, 10)
    virtual.queue.ensure([(2, virtual.now - 500)])
    virtual.advance(10)
    assert virtual.queue.reserve(10, 1000).entries == (Entry(1, 2), Entry(2, 1))


@pytest.mark.parametrize("asked", [1000, 1001, 5000])
def test_never_more_than_a_thousand_at_once(virtual: VirtualQueue, asked: int) -> None:
    virtual.queue.ensure([(id, virtual.now) for id in range(1, 2501)])
    seen: set[int] = set()
    for expected in [1000, 1000, 500, 0]:
        ids = {entry.id for entry in virtual.queue.reserve(asked, 1000).entries}
        assert len(ids) == expected
        assert not ids & seen
        seen |= ids
    assert seen == set(range(1, 2501))


def test_the_limit_spans_lapsed_and_waiting_entries(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now), (2, virtual.now)])
    virtual.queue.reserve(2, 5)
    virtual.queue.ensure([(id, virtual.now) for id in range(3, 9)])
    virtual.advance(5)
    assert [entry.id for entry in virtual.queue.reserve(4, 9).entries] == [1, 2, 3, 4]


def test_the_next_time_is_the_earliest_of_due_times_and_lease_ends(virtual: VirtualQueue) -> None:
    now = virtual.now
    virtual.queue.ensure([(1, now), (2, now + 700)])
    assert virtual.queue.reserve(1, 500).next_due_ms == now + 500
    virtual.queue.ensure([(3, now + 400)])
    assert virtual.queue.reserve(1, 500).next_due_ms == now + 400


def test_a_leased_entry_belongs_to_nobody_else_until_the_lease_ends(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.queue.reserve(1, 1000)
    virtual.advance(999)
    assert virtual.queue.reserve(1, 1000).entries == ()
    virtual.advance(1)
    assert virtual.queue.reserve(1, 1000).entries == (Entry(1, 2),)


def test_unanswered_deliveries_are_counted_up_to_fifteen(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    counts = []
    for _ in range(17):
        counts.append(virtual.queue.reserve(1, 1).entries[0].deliveries)
        virtual.advance(1)
    assert counts == [*range(1, 16), 15, 15]


def test_six_hundred_leases_in_one_millisecond_all_differ(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(id, virtual.now) for id in range(1, 641)])
    leases = [virtual.queue.reserve(1, 1000).lease for _ in range(640)]
    assert len(set(leases)) == 640
    for lease in leases:
        assert lease is not None
        assert virtual.queue.acknowledge(lease) == 1


def test_leases_that_are_gone_already_are_not_repeated_in_their_millisecond(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(id, virtual.now) for id in range(1, 61)])
    leases = set()
    for _ in range(60):
        lease = virtual.queue.reserve(1, 1000).lease
        assert lease is not None
        leases.add(lease)
        virtual.queue.acknowledge(lease)
    assert len(leases) == 60


def test_a_foreign_value_of_the_counter_does_no_harm(virtual: VirtualQueue) -> None:
    for id, value in enumerate(["nan", "inf", "-1", "1e9", "99", "", "x" * 1000, str(2**63)], start=1):
        virtual.client.set(virtual.queue.keys.counter, value)
        virtual.queue.ensure([(id, virtual.now)])
        lease = virtual.queue.reserve(1, 1000).lease
        assert lease is not None
        assert virtual.queue.acknowledge(lease) == 1


def test_the_widest_ids_and_times_survive(virtual: VirtualQueue) -> None:
    top = 2**63 - 1
    virtual.queue.ensure([(top, 0), (top - 1, 2**42 - 1), (10**18, 1)])
    assert virtual.waiting() == {top: 0, top - 1: 2**42 - 1, 10**18: 1}
    assert [entry.id for entry in virtual.queue.reserve(5, 1).entries] == [top, 10**18]


@pytest.mark.parametrize(("limit", "lease_ms"), [(0, 1), (-1, 1), (1, 0), (1, 86_400_001)])
def test_limits_and_leases_out_of_range_are_refused(virtual: VirtualQueue, limit: int, lease_ms: int) -> None:
    with pytest.raises(ValueError, match=r"is 1 or more|1 ms to 24 hours"):
        virtual.queue.reserve(limit, lease_ms)
