"""Which lines a worker asks and for how many: a fair share for each policy, whatever the backlog of another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from django_delayq import Limits, Rate, operations
from django_delayq.firing import Report, Work, run
from django_delayq.firing.executors import Executor
from django_delayq.models import Timeout
from django_delayq.redis_clients import get_worker_engine
from django_delayq.worker import Worker, lines
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.lines import MAX_TAKEN, Lines
from tests.support.workers import Declare, due_orders, needs_more_connections
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
REMIND, LINGER, UNPAID = (f"testapp.order.{name}" for name in ("remind", "linger", "cancel_unpaid"))
EACH = {REMIND: 100, LINGER: 100, UNPAID: 100}
BY = "script:test"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by which a worker counts what it has completed by one that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def worker(clock: list[float]) -> Lines:
    """Of a worker with four threads."""
    return Lines("default", 4, 0.5)


def limits(of: Lines, *due: str, left: int = 10_000, taken: Mapping[str, int] | None = None) -> dict[str, int]:
    return of.limits(due, of.declared(), taken or {}, left)


SHARES: dict[str, tuple[dict[str, int], dict[str, int], list[str], dict[str, int]]] = {
    "what its threads can begin, of a worker that has done nothing yet": ({}, {}, [REMIND], {REMIND: 4}),
    "slow ones are left to others although other policies are quick": (
        {REMIND: 500, LINGER: 1}, {}, [REMIND, LINGER], {REMIND: 250, LINGER: 4},
    ),
    "running timeouts take room": ({}, {REMIND: 3}, [REMIND], {REMIND: 1}),
    "running timeouts may take all of it": ({}, {REMIND: 4}, [REMIND], {}),
    "little room in a large backlog is not worth asking": ({REMIND: 400}, {REMIND: 301}, [REMIND], {}),
    "a quarter of it is": ({REMIND: 400}, {REMIND: 300}, [REMIND], {REMIND: 100}),
    "each the same number": (EACH, {}, [*EACH], EACH),
    "one that has more than the others gets nothing": (EACH, {REMIND: 150}, [*EACH], {LINGER: 50, UNPAID: 50}),
    "what one does not use is for the others": ({REMIND: 400}, {}, [REMIND, LINGER], {REMIND: 200, LINGER: 4}),
    "one of which it has none is asked although there is no room": (
        {REMIND: 300}, {REMIND: 300}, [REMIND, LINGER], {LINGER: 1},
    ),
    "and is not asked when it has one": ({REMIND: 300}, {REMIND: 300, LINGER: 1}, [REMIND, LINGER], {}),
}  # fmt: skip
"""What it has completed and has in flight, which policies have due timeouts, and for how many of each it asks."""


@pytest.mark.parametrize("case", SHARES)
def test_how_many_of_each_policy_a_worker_of_four_threads_asks_for(worker: Lines, case: str) -> None:
    completed, in_flight, due, expected = SHARES[case]
    for policy, count in completed.items():
        worker.completed(policy, count)
    worker.in_flight.update(in_flight)
    assert limits(worker, *due) == expected


def test_what_was_taken_in_this_pass_counts(worker: Lines) -> None:
    worker.completed(REMIND, 400)
    assert limits(worker, REMIND, taken={REMIND: 200, LINGER: 1}) == {REMIND: 199}


def test_it_asks_for_as_much_as_it_has_done_in_half_a_second(worker: Lines, clock: list[float]) -> None:
    worker.completed(REMIND, 300)
    assert limits(worker, REMIND) == {REMIND: 300}
    clock[0] += 0.6
    assert limits(worker, REMIND) == {REMIND: 300}, "within the half second before"
    clock[0] += 0.6
    assert limits(worker, REMIND) == {REMIND: 4}
    worker.completed(REMIND, 50_000)
    assert limits(worker, REMIND) == {REMIND: MAX_TAKEN}


def test_what_is_left_to_others_is_not_asked_for_until_a_timeout_completes_or_the_time_is_over(
    worker: Lines, clock: list[float]
) -> None:
    worker.leave(REMIND, 20)
    assert limits(worker, REMIND, LINGER) == {LINGER: 4}
    assert worker.seconds_left == 20
    worker.completed(LINGER, 1)
    assert limits(worker, REMIND) == {REMIND: 4}
    worker.leave(REMIND, 20)
    clock[0] += 20.1
    assert limits(worker, REMIND) == {REMIND: 4}


def test_a_batch_counts_as_what_one_thread_can_begin(worker: Lines, declare: Declare) -> None:
    policy = declare(Order, name="in_batches", batch=50)
    assert limits(worker, policy.label) == {policy.label: 200}


def test_it_is_asked_although_what_the_worker_has_has_become_slow(worker: Lines, clock: list[float]) -> None:
    worker.completed(REMIND, 300)
    worker.in_flight[REMIND] = 300
    clock[0] += 60
    assert limits(worker, REMIND, LINGER) == {LINGER: 1}


def test_of_many_slow_policies_it_holds_no_more_than_twice_what_its_threads_run(declare: Declare) -> None:
    labels = [declare(Order, name=f"slow_{number}").label for number in range(20)]
    one = Lines("default", 4, 0.5)
    for _ in range(10):
        one.in_flight.update(limits(one, *labels))
    assert one.in_flight.total() == 8
    assert max(one.in_flight.values()) == 1


def test_with_room_for_one_only_the_policies_take_turns() -> None:
    one = Lines("default", 1, 0.5)
    taken = Counter(label for _ in range(9) for label in limits(one, REMIND, LINGER, UNPAID, left=1))
    assert taken == {REMIND: 3, LINGER: 3, UNPAID: 3}


def test_a_worker_that_may_take_three_more_takes_three(worker: Lines) -> None:
    assert sum(limits(worker, REMIND, LINGER, left=3).values()) == 3
    assert limits(worker, REMIND, LINGER, left=0) == {}


def test_the_lines_of_a_policy_and_its_former_labels_share_one_part(worker: Lines, declare: Declare) -> None:
    policy = declare(Order, name="now", aliases=("testapp.order.then",))
    worker.completed(policy.label, 100)
    worker.completed(REMIND, 100)
    found = limits(worker, *policy.labels, REMIND)
    assert found == {"testapp.order.now": 50, "testapp.order.then": 50, REMIND: 100}


def test_only_what_is_declared_and_not_stopped_may_be_asked(worker: Lines, declare: Declare) -> None:
    policy = declare(Order, name="now", aliases=("testapp.order.then",))
    operations.pause(policy, by=BY)
    operations.hold(LINGER, by=BY)
    may_run = worker.may_run()
    assert REMIND in may_run
    assert may_run.keys().isdisjoint([*policy.labels, LINGER, "testapp.order.undeclared"])
    operations.resume(policy, by=BY)
    assert set(policy.labels) <= worker.may_run().keys()


def test_a_policy_with_a_rate_is_left_out_until_it_has_a_slot(
    worker: Lines, clock: list[float], declare: Declare
) -> None:
    policy = declare(Order, name="rated", limits=Limits(rate=Rate(10, per=timedelta(minutes=1))))
    assert policy.label in worker.declared()
    worker.refuse(policy, 6.0)
    assert policy.label not in worker.declared()
    assert worker.seconds_left == 6.0
    clock[0] += 6.0
    assert policy.label in worker.declared()
    assert worker.seconds_left == float("inf")


class Threads(Executor):
    """Run nothing until the test asks for it; in turns by policy, as the executor of threads does."""

    keeps_leases = True

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[Work, Any]]] = {}

    def submit(self, work: Work, done: Callable[[Work, Report], None]) -> None:
        self.waiting.setdefault(work.policy, []).append((work, done))

    def close(self, *, wait: bool = True) -> None:
        """Run nothing more."""

    def run_next(self) -> str:
        """Run one work to its end, and return its policy."""
        policy = next(iter(self.waiting))
        of_policy = self.waiting.pop(policy)
        work, done = of_policy.pop(0)
        if of_policy:
            self.waiting[policy] = of_policy
        done(work, run(work, "default"))
        return policy


def passing(executor: Threads, threads: int) -> Callable[[], None]:
    """Return a function that makes one pass of a worker, whose works the test runs."""
    worker = Worker(concurrency=threads)
    worker._connect(get_worker_engine("default"))
    worker.redis.probe_at_start(worker.queues)
    dispatch = Dispatch(worker, executor)

    def make_pass() -> None:
        worker.sources.check_now()
        worker.sources.ledger.check_now()
        worker._pass(dispatch)

    return make_pass


@pytest.mark.parametrize("source", ["redis"], indirect=True)
def test_a_worker_without_room_waits_for_its_threads_when_redis_is_back(source: str) -> None:
    """It reads the ledger until that has no more, and would do so all the time while its threads are busy."""
    due_orders("remind", 10)
    worker = Worker(concurrency=4)
    worker._connect(get_worker_engine("default"))
    worker.redis.probe_at_start(worker.queues)
    lines = Lines("default", 4, 0.5)
    worker.sources._must_poll = True
    taken = worker.sources.take(lines, 100)
    assert (len(taken.deliveries), taken.is_part) == (4, True)
    lines.in_flight[REMIND] = 4
    assert worker.sources.take(lines, 100).wait_seconds > 0.5
    lines.in_flight.clear()
    lines.completed(REMIND, 100)
    assert len(worker.sources.take(lines, 100).deliveries) == 6
    assert not worker.sources._must_poll


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("is_quick", [True, False])
def test_a_flood_delays_another_policy_by_one_firing_of_each_thread(
    source: str, declare: Declare, threads: int, is_quick: bool
) -> None:
    """Counted in firings, not in seconds: 1,000 are due when one of another policy comes."""
    flood = due_orders(declare(Order, name="flood", atomic=False), 1_000)
    executor = Threads()
    make_pass = passing(executor, threads)
    make_pass()
    for _ in range(30 if is_quick else 1):
        for _ in range(min(threads, sum(map(len, executor.waiting.values())))):
            executor.run_next()
        make_pass()
    due_orders("linger")
    make_pass()
    fired: list[str] = []
    while LINGER not in fired:
        fired.append(executor.run_next())
        make_pass()
    assert len(fired) <= threads + 1
    assert Timeout.objects.pending().filter(pk__in=[row.pk for row in flood]).count() > 500


def test_each_of_several_floods_goes_on(source: str, declare: Declare) -> None:
    policies = [declare(Order, name=f"flood_{number}", atomic=False) for number in range(3)]
    for policy in policies:
        due_orders(policy, 40)
    executor = Threads()
    make_pass = passing(executor, 4)
    fired: list[str] = []
    for _ in range(60):
        make_pass()
        fired.append(executor.run_next())
    counts = Counter(fired)
    assert sorted(counts) == sorted(policy.label for policy in policies)
    assert min(counts.values()) >= 15, counts


@needs_more_connections
@pytest.mark.parametrize(("threads", "unheeded"), [(1, 9), (20, 9), (21, 0)])
def test_a_worker_sleeps_until_reports_leave_room_worth_a_round_trip(threads: int, unheeded: int) -> None:
    """A quarter of what it has; but each one, if its threads could begin all of that at once."""
    due_orders("remind", 40)
    worker, executor = Worker(concurrency=threads), Threads()
    dispatch = Dispatch(worker, executor)
    dispatch.lines.completed(REMIND, 40)
    worker._pass(dispatch)
    assert dispatch.in_flight == 40
    dispatch.let_run()
    for _ in range(unheeded):
        executor.run_next()
    assert worker._wakeup._calls.empty()
    executor.run_next()
    assert not worker._wakeup._calls.empty()


def test_a_report_with_a_timeout_to_be_tried_again_wakes_the_worker(declare: Declare) -> None:
    policy = declare(Order, name="fails", handler=lambda *_: 1 / 0)
    due_orders(policy, 40)
    worker, executor = Worker(concurrency=4), Threads()
    dispatch = Dispatch(worker, executor)
    dispatch.lines.completed(policy.label, 40)
    worker._pass(dispatch)
    dispatch.let_run()
    executor.run_next()
    assert not worker._wakeup._calls.empty()
