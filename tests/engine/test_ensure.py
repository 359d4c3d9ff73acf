"""ensure, reschedule and remove: what is in the queue, and due when."""

from __future__ import annotations

import pytest

from django_delayq.engine.engine import Engine
from tests.engine.lines import one_line
from tests.engine.virtual import START_MS, VirtualQueue

pytestmark = pytest.mark.slow

DAY_MS = 86_400_000


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2001])
def test_ensure_adds_any_number_of_entries(virtual: VirtualQueue, count: int) -> None:
    entries = [(id, START_MS + id) for id in range(1, count + 1)]
    assert virtual.queue.ensure(iter(entries)) == count
    assert virtual.waiting() == dict(entries)
    assert virtual.queue.ensure(entries) == 0


def test_ensure_moves_a_waiting_entry_earlier_and_never_later(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, 500), (2, 500), (3, 500)])
    assert virtual.queue.ensure([(1, 499), (2, 500), (3, 501), (4, 7)]) == 2
    assert virtual.waiting() == {1: 499, 2: 500, 3: 500, 4: 7}


def test_ensure_of_one_id_twice_keeps_the_earliest(virtual: VirtualQueue) -> None:
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
    assert virtual.queue.reserve(1, 10).entries[0].deliveries == 2


def test_ensure_leaves_a_leased_entry_alone(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    lease = virtual.queue.reserve(1, 1000).lease
    before = virtual.scores()
    assert virtual.queue.ensure([(1, 0)]) == 0
    assert virtual.scores() == before
    assert lease is not None
    assert virtual.queue.acknowledge(lease) == 1


def test_ensure_takes_an_entry_back_from_a_lease_that_ends_later_than_any_may(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now), (2, virtual.now)])
    virtual.advance(30 * DAY_MS)
    virtual.queue.reserve(1, 1000)
    virtual.queue.reserve(1, DAY_MS)
    virtual.advance(-30 * DAY_MS)  # the clock of the server is corrected
    assert virtual.queue.ensure([(1, START_MS + 5), (2, START_MS + 5)]) == 2
    assert virtual.waiting() == {1: START_MS + 5, 2: START_MS + 5}


def test_a_lease_that_ends_later_than_any_may_is_neither_honored_by_reserve_nor_by_ensure(
    virtual: VirtualQueue,
) -> None:
    queue = one_line(Engine(virtual.client, caller=virtual.queue.queue._caller, longest_lease_ms=1000))
    queue.ensure([(1, virtual.now), (2, virtual.now), (3, virtual.now)])
    assert queue.reserve(3, 1000).lease is not None
    assert not queue.reserve(3, 1000).entries, "this one is the longest that may be"
    virtual.advance(-2)  # the clock of the server is corrected
    assert [entry.deliveries for entry in queue.reserve(2, 500).entries] == [2, 2]
    assert queue.ensure([(id, virtual.now - 10) for id in (1, 2, 3)]) == 1, "that of the third one"


def test_ensure_respects_the_longest_lease(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.queue.reserve(1, DAY_MS)
    assert virtual.queue.ensure([(1, 0)]) == 0


def test_ensure_brings_back_an_entry_whose_score_is_out_of_this_world(virtual: VirtualQueue) -> None:
    virtual.client.zadd(virtual.entries, {"1": "inf", "2": "1e300", "3": 2**53})
    assert virtual.queue.ensure([(1, 10), (2, 10), (3, 10)]) == 3
    assert virtual.waiting() == {1: 10, 2: 10, 3: 10}


def test_reschedule_sets_due_times_both_ways_and_begins_deliveries_anew(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now), (2, 500)])
    lease = virtual.queue.reserve(1, 1000).lease
    assert virtual.queue.reschedule([(1, virtual.now + 9), (2, virtual.now), (3, 4)]) == 3
    assert virtual.waiting() == {1: virtual.now + 9, 2: virtual.now, 3: 4}
    assert lease is not None
    assert virtual.queue.acknowledge(lease) == 0
    virtual.advance(9)
    assert {entry.deliveries for entry in virtual.queue.reserve(9, 1).entries} == {1}


@pytest.mark.parametrize("count", [0, 1, 1000, 1001, 2001])
def test_remove_takes_out_waiting_and_leased_entries(virtual: VirtualQueue, count: int) -> None:
    ids = range(1, count + 1)
    virtual.queue.ensure([(id, virtual.now) for id in [*ids, 5000]])
    virtual.queue.reserve(10, 1000)
    assert virtual.queue.remove(iter([*ids, 6000])) == count
    assert list(virtual.scores()) == [5000]


def test_the_new_head_is_published_when_it_is_earlier(virtual: VirtualQueue) -> None:
    queue = virtual.queue
    queue.ensure([(1, 500), (2, 400)])
    assert virtual.wakes() == [400]
    queue.ensure([(3, 400), (4, 401), (5, 399)])
    assert virtual.wakes() == [399]
    queue.ensure([(1, 398)])
    assert virtual.wakes() == [398]
    queue.reschedule([(6, 397)])
    assert virtual.wakes() == [397]


def test_nothing_is_published_while_the_head_stays_or_moves_later(virtual: VirtualQueue) -> None:
    queue = virtual.queue
    queue.ensure([(1, 500)])
    virtual.wakes()
    queue.ensure([(1, 500), (2, 500), (3, 600)])
    queue.reschedule([(1, 800), (2, 700), (3, 600)])
    queue.remove([3])
    assert virtual.wakes() == []


def test_a_head_is_published_although_a_lease_lapses_before_it(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now)])
    virtual.queue.reserve(1, 1)
    virtual.wakes()
    virtual.queue.ensure([(2, virtual.now + 100)])
    assert virtual.wakes() == [virtual.now + 100]


def test_a_released_head_is_published(virtual: VirtualQueue) -> None:
    virtual.queue.ensure([(1, virtual.now), (2, virtual.now + 50)])
    lease = virtual.queue.reserve(1, 1000).lease
    virtual.wakes()
    assert lease is not None
    virtual.queue.release(lease, [(1, virtual.now + 49)])
    assert virtual.wakes() == [virtual.now + 49]
