"""10,000 timeouts of one policy are due at once: another policy's fire all the same, and no memory is needed for it.

No test reads a clock: a timeout that fires while most of the backlog is pending did not wait for the backlog.
"""

from __future__ import annotations

import pytest

from tests.e2e.fairness.crowds import crowd, fired, latecomers, waiting
from tests.settings import DB
from tests.support.processes import StartWorker, end, memory_mb
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DB == "sqlite", reason="slow handlers wait for the write lock of SQLite"),
]

CROWD = 10_000


def test_a_crowd_of_one_policy_does_not_hold_up_another_one(start_worker: StartWorker, source: dict[str, str]) -> None:
    crowd("linger", CROWD)
    worker = start_worker(LINGER="0.005", **source)
    wait_until(lambda: waiting("linger") < CROWD - 100, "the worker is at it")
    before = memory_mb(worker.pid)
    for queue in ("default", "one that no policy names"):
        late = latecomers(20, queue)
        wait_until(lambda ids=late: fired(ids) == 20, "the latecomers have fired")  # type: ignore[misc]
    assert waiting("linger") > CROWD / 2, "they had to wait for the backlog"
    wait_until(lambda: waiting("linger") < CROWD - 500, "the backlog continues too")
    assert memory_mb(worker.pid) < before + 24
    end(worker)


@pytest.mark.parametrize("source", ["redis"], indirect=True)
def test_a_crowd_of_slow_handlers_leaves_threads_to_others(start_worker: StartWorker, source: dict[str, str]) -> None:
    """All threads are busy for a while each time, and a hundred more are held: the next free one is another's."""
    crowd("linger", 200)
    worker = start_worker(LINGER="0.5", **source)
    wait_until(lambda: waiting("linger") < 200, "every thread is at it")
    late = latecomers(20)
    wait_until(lambda: fired(late) == 20, "the latecomers have fired")
    assert waiting("linger") > 120, "they had to wait for the backlog"
    end(worker)
