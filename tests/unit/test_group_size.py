"""How many timeouts share a transaction, and on how many threads, by what their handlers cost."""

from __future__ import annotations

import math

from django_delayq.firing.state import CORES, LOCK_SECONDS, MAX_LOCK_SECONDS, Cost, GroupSize


def quick(count: int, seconds: float = 0.0001) -> Cost:
    """Return the cost of `count` handlers that only use the CPU."""
    return Cost(overhead=0.001, handlers=count * seconds, cpu=count * seconds)


def test_quick_handlers_share_more_and_more() -> None:
    pace, sizes = GroupSize(), []
    for _ in range(5):
        sizes.append(pace.size())
        pace.record_success(sizes[-1], quick(sizes[-1]))
    assert sizes == [1, 4, 16, 50, 50]


def test_handlers_that_become_slow_share_less_and_quick_ones_more_within_a_few_groups() -> None:
    pace, sizes = GroupSize(seconds=0.0001, proven=50), []
    for _ in range(6):
        pace.record_success(pace.size(), quick(pace.size(), 0.004))
        sizes.append(pace.size())
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] < 20, sizes[-1]) == (True, 5)
    pace.record_success(5, quick(5, 0.1))
    assert pace.size() == 1, "very slow ones at once"
    for _ in range(15):
        pace.record_success(pace.size(), quick(pace.size()))
    assert pace.size() == 50


def test_groups_stay_large_while_threads_wait_for_each_other_or_the_machine_is_busy() -> None:
    pace, slowness, sizes = GroupSize(seconds=0.0005, overhead=0.004, proven=50), 4, []
    for _ in range(20):
        sizes.append(pace.size())
        cpu = 0.0004 * sizes[-1]
        pace.record_success(sizes[-1], Cost(overhead=slowness * 0.004, handlers=slowness * 0.0005 * sizes[-1], cpu=cpu))
    assert (min(sizes) >= 20, sizes[-1] >= 30) == (True, True)


def test_however_slow_a_transaction_is_its_locks_are_bounded() -> None:
    pace = GroupSize(seconds=0.01, overhead=1.0, proven=50)
    assert pace.size() == MAX_LOCK_SECONDS / 0.01
    pace.foreign_share = 0.9
    assert pace.size() == LOCK_SECONDS / 0.01, "of handlers that wait for something else"


def test_groups_stay_large_while_the_database_is_as_slow_for_handlers_as_for_the_transaction() -> None:
    pace, sizes = GroupSize(seconds=0.005, overhead=0.02, proven=50), []
    for _ in range(20):
        sizes.append(pace.size())
        handlers = 0.005 * sizes[-1]
        pace.record_success(sizes[-1], Cost(0.02, handlers, cpu=0.1 * handlers, database=0.9 * handlers))
    assert set(sizes) == {20}


def test_one_outlier_is_forgotten_within_a_few_groups() -> None:
    pace = GroupSize(seconds=0.0005, overhead=0.003, idle_share=0.2, proven=50)
    pace.record_success(1, quick(1, 0.03))
    sizes = []
    for _ in range(10):
        sizes.append(pace.size())
        pace.record_success(sizes[-1], quick(sizes[-1], 0.0005))
    assert sizes == sorted(sizes)
    assert sizes[-1] > 20


def test_handlers_that_wait_share_less_and_may_use_every_thread() -> None:
    pace, sizes = GroupSize(seconds=0.0001, proven=50), []
    for _ in range(20):
        sizes.append(pace.size())
        pace.record_success(sizes[-1], Cost(0.003, 0.01 * sizes[-1], 0.0001 * sizes[-1]))
    assert max(sizes[6:]) * 0.01 <= LOCK_SECONDS
    assert pace.threads == math.inf


def test_handlers_that_use_the_cpu_run_on_two_threads_at_once() -> None:
    pace = GroupSize()
    assert pace.threads == math.inf, "nothing is known"
    pace.record_success(1, quick(1))
    assert pace.threads == 2, "one runs while the other waits for the database"


def test_handlers_that_wait_about_as_long_as_they_use_the_cpu_run_on_each_core() -> None:
    pace = GroupSize()
    pace.record_success(1, Cost(overhead=0.003, handlers=0.003, cpu=0.001))
    assert pace.threads == max(2, CORES)


def test_failures_make_groups_small_for_a_while() -> None:
    pace = GroupSize(seconds=0.0001, proven=50)
    pace.record_failure(1, quick(1))
    once = pace.size()
    for _ in range(10):
        pace.record_failure(1, quick(1))
    assert 1 == pace.size() < once < 50
    for _ in range(100):
        pace.record_success(1, quick(1))
    assert pace.size() == 50
