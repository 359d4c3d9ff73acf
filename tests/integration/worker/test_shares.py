"""Which lines a worker asks and for how many: a fair share for each policy. What it may not fire costs it nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq import Limits, Rate, clock, operations, schedule_timeouts
from django_delayq.firing import Report, Work, run
from django_delayq.firing.executors import Executor
from django_delayq.ledger import controls
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.redis_clients import get_worker_engine
from django_delayq.worker import Worker, lines
from django_delayq.worker.background import Background
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.lines import MAX_TAKEN, Lines
from django_delayq.worker.sweep import Sweep
from tests.support.workers import Declare, due_orders, queue_in_redis
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
REMIND, LINGER, UNPAID = (f"testapp.order.{name}" for name in ("remind", "linger", "cancel_unpaid"))
EACH = {REMIND: 100, LINGER: 100, UNPAID: 100}
BY = "script:test"


@pytest.fixture(autouse=True)
def each_pass_is_a_second_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read in one pass is too old in the next one."""
    monkeypatch.setattr(controls, "CACHE_SECONDS", 0.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by which a worker counts what it has completed by one that a test sets."""
    seconds = [1000.0]
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


@pytest.fixture
def worker(now: list[float]) -> Lines:
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


def test_it_asks_for_as_much_as_it_has_done_in_half_a_second(worker: Lines, now: list[float]) -> None:
    worker.completed(REMIND, 400)
    assert limits(worker, REMIND, taken={REMIND: 200, LINGER: 1}) == {REMIND: 199}, "without what this pass has taken"
    assert limits(worker, REMIND) == {REMIND: 400}
    now[0] += 0.6
    assert limits(worker, REMIND) == {REMIND: 400}, "within the half second before"
    now[0] += 0.6
    assert limits(worker, REMIND) == {REMIND: 4}
    worker.completed(REMIND, 50_000)
    assert limits(worker, REMIND) == {REMIND: MAX_TAKEN}
    assert sum(limits(worker, REMIND, LINGER, left=3).values()) == 3
    assert limits(worker, REMIND, LINGER, left=0) == {}
    worker.in_flight[REMIND] = 50_000
    now[0] += 60
    assert limits(worker, REMIND, LINGER) == {LINGER: 1}, "although what it has has become slow"


def test_what_is_left_to_others_is_not_asked_for_until_a_timeout_completes_or_the_time_is_over(
    worker: Lines, now: list[float]
) -> None:
    worker.leave(REMIND, 20)
    assert limits(worker, REMIND, LINGER) == {LINGER: 4}
    assert worker.seconds_left == 20
    worker.completed(LINGER, 1)
    assert limits(worker, REMIND) == {REMIND: 4}
    worker.leave(REMIND, 20)
    now[0] += 20.1
    assert limits(worker, REMIND) == {REMIND: 4}


def test_of_many_slow_policies_it_holds_no_more_than_twice_what_its_threads_run_and_they_take_turns(
    declare: Declare,
) -> None:
    labels = [declare(Order, name=f"slow_{number}").label for number in range(20)]
    many, one = Lines("default", 4, 0.5), Lines("default", 1, 0.5)
    for _ in range(10):
        many.in_flight.update(limits(many, *labels))
    assert many.in_flight.total() == 8
    assert max(many.in_flight.values()) == 1
    taken = Counter(label for _ in range(9) for label in limits(one, *EACH, left=1))
    assert taken == {REMIND: 3, LINGER: 3, UNPAID: 3}


def test_only_what_is_declared_has_a_slot_and_is_not_stopped_may_be_asked(
    worker: Lines, now: list[float], declare: Declare
) -> None:
    policy = declare(Order, name="now", aliases=("testapp.order.then",))
    operations.pause(policy, by=BY)
    operations.hold(LINGER, by=BY)
    may_run = worker.may_run()
    assert REMIND in may_run
    assert may_run.keys().isdisjoint([*policy.labels, LINGER, "testapp.order.undeclared"])
    operations.resume(policy, by=BY)
    assert set(policy.labels) <= worker.may_run().keys()
    rated = declare(Order, name="rated", limits=Limits(rate=Rate(10, per=timedelta(minutes=1))))
    assert rated.label in worker.declared()
    worker.refuse(rated, 6.0)
    assert rated.label not in worker.declared()
    assert worker.seconds_left == 6.0
    now[0] += 6.0
    assert rated.label in worker.declared()
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


def connected(threads: int) -> Worker:
    """Return a worker that has found its Redis."""
    worker = Worker(concurrency=threads)
    worker._connect(get_worker_engine("default"))
    worker.redis.probe_at_start(worker.queues)
    return worker


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_flood_delays_another_policy_by_one_firing_of_each_thread(
    source: str, declare: Declare, is_quick: bool
) -> None:
    """Counted in firings, not in seconds: hundreds are due when one of another policy comes."""
    flood, threads, executor = declare(Order, name="flood", atomic=False), 4, Threads()
    schedule_timeouts(Order.objects.bulk_create(Order() for _ in range(400)), flood, seconds=0)
    worker = connected(threads)
    dispatch = Dispatch(worker, executor)

    def make_pass() -> None:
        worker.sources.check_now()
        worker.sources.ledger.check_now()
        worker._pass(dispatch)

    make_pass()
    for _ in range(15 if is_quick else 1):
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
    assert Timeout.objects.filter(policy=flood.label).pending().count() > 200


# What a worker may not fire


class Idle:
    """A worker whose passes a test makes."""

    def __init__(self) -> None:
        self.executor = Threads()
        self.worker = connected(4)
        self.sent: Counter[str] = Counter()
        """How often each command was sent to Redis, which other tests may use, too."""
        if (engine := self.worker.redis.engine) is not None:
            send = engine.caller.send
            cast("Any", engine.caller).send = lambda calls: [
                self.sent.update(each.command for each in calls),
                send(calls),
            ][1]
        self.dispatch = Dispatch(self.worker, self.executor)
        self.background = Background(self.worker)
        if engine is not None:
            Sweep(engine, "default", self.worker.skew).run_once(everything=True)
        stop_cache.forget()
        self.background.follow()
        self.background._queues_at = inf  # it is due twice a minute, and a slow machine takes more than half of one

    def pass_after_a_second(self) -> list[str]:
        """Return the policies whose works wait to be run."""
        self.worker.sources.redis.check_now()
        self.worker.sources.ledger.check_now()
        self.worker._pass(self.dispatch)
        return list(self.executor.waiting)

    def cost_of_a_minute(self) -> tuple[Counter[str], Counter[str]]:
        """Return which statements and commands one minute takes, and check that nothing was begun in it."""
        self.pass_after_a_second()
        self.sent.clear()
        with CaptureQueriesContext(connection) as queries:
            for second in range(60):
                if second % 5 == 0:
                    self.background.follow()
                assert self.pass_after_a_second() == []
        statements = (re.sub(r"'.*?'|\d+", "", query["sql"], flags=re.DOTALL) for query in queries)
        return Counter(statement[:200] for statement in statements), self.sent.copy()


@pytest.mark.parametrize("why", ["paused", "not declared"])
def test_a_policy_that_may_not_fire_costs_as_much_as_an_empty_ledger(source: str, declare: Declare, why: str) -> None:
    empty = statements, sent = Idle().cost_of_a_minute()
    assert statements.total() < (20 if source == "redis" else 80)
    assert (sent.total() <= 61) if source == "redis" else not sent
    policy = declare(Order, name="waiting")
    schedule_timeouts(Order.objects.bulk_create(Order() for _ in range(2_000)), policy, hours=1)
    Timeout.objects.update(run_at=clock.now() - timedelta(hours=1), created_at=clock.now() - timedelta(hours=2))
    if why == "paused":
        operations.pause(policy, by="script:test")
    else:
        registry.remove(policy)
    idle = Idle()
    assert idle.cost_of_a_minute() == empty
    due_orders("remind")
    assert idle.pass_after_a_second() == [REMIND], "it delays no other policy"
    idle.executor.run_next()
    if why == "paused":
        operations.resume(policy, by="script:test")
    else:
        registry.add(policy)
    assert idle.pass_after_a_second() == [policy.label]


def test_a_message_tells_an_idle_worker_that_a_policy_was_resumed(
    with_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_orders("remind")
    operations.pause(REMIND, by="script:test")
    idle = Idle()
    idle.pass_after_a_second()
    client: Any = with_redis
    with client.pubsub() as listener:
        listener.subscribe(queue_in_redis().keys.wake)
        assert listener.get_message(timeout=5)["type"] == "subscribe"
        with monkeypatch.context() as in_another_process:
            in_another_process.setattr(stop_cache, "forget", lambda: None)
            operations.resume(REMIND, by="script:test")
        assert listener.get_message(timeout=5)["type"] == "message"
    assert not idle.pass_after_a_second(), "without the message it would notice some seconds later"
    idle.worker.sources.check_now()
    idle.worker._pass(idle.dispatch)
    assert list(idle.executor.waiting) == [REMIND]
