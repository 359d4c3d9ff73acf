"""`Limits(rate=...)`: a worker claims as many as may begin soon, in due order, and keeps none that are lost."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from django_delayq import Limits, Rate, TimeoutPolicy, clock
from django_delayq.engine.engine import Engine
from django_delayq.firing import Work, plan, run
from django_delayq.ledger import claiming
from django_delayq.ledger.claiming import Slot
from django_delayq.models import RateShare, Timeout
from django_delayq.worker import Worker
from django_delayq.worker import dispatch as dispatch_module
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.lines import Lines
from django_delayq.worker.servers import ClockSkew, RedisHealth
from django_delayq.worker.sources.ledger import Batch
from django_delayq.worker.sources.redis import Sources
from tests.integration.firing.conftest import another_session, needs_row_locks
from tests.support.waiting import wait_until
from tests.support.workers import Declare, StartWorker, all_are, due_orders, needs_more_connections
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
RATE = Rate(20, per=timedelta(seconds=2))
Rated = TimeoutPolicy[Any]


@pytest.fixture
def rated(declare: Declare) -> Rated:
    return declare(Order, name="rated", limits=Limits(rate=RATE))


class Begins:
    """A handler that notes when it began, with which timeouts."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ids: list[int] = []

    def __call__(self, _: Any, timeout: Timeout) -> None:
        self.at.append(time.monotonic())
        self.ids.append(timeout.pk)

    def most_within(self, seconds: float) -> int:
        """Return how many began within `seconds` without a tenth: a thread may pause between its slot and its note."""
        at, seconds = sorted(self.at), 0.9 * seconds
        return max(bisect_left(at, begin + seconds) - place for place, begin in enumerate(at))


def overdue(policy: Any, count: int) -> list[int]:
    """Make so many timeouts, due one after the other within the last minutes; return their ids in this order."""
    rows = due_orders(policy, count)
    for place, row in enumerate(rows):
        row.run_at = row.due_at = clock.now() - timedelta(seconds=count - place)
    Timeout.objects.bulk_update(rows, ["run_at", "due_at"])
    return [row.pk for row in rows]


def claim(policy: TimeoutPolicy[Any], limit: int = 50) -> claiming.Granted:
    granted = try_to_claim(policy, limit)
    assert granted is not None
    return granted


def try_to_claim(policy: TimeoutPolicy[Any], limit: int) -> claiming.Granted | None:
    minute = timedelta(minutes=1)
    return claiming.claim_in_slots(policy, "default", None, limit=limit, seconds=minute, preparation=0.0)


def four_threads() -> Lines:
    """What a worker with four threads asks for."""
    return Lines("default", 4, 0.5)


def made_sources(engine: Engine | None = None) -> Sources:
    """Both sources of a worker."""
    health, queues = RedisHealth(engine), ["default"] if engine else []
    health.probe_at_start(queues)
    return Sources(health, queues, None, "default", ClockSkew("default"))


def test_slots_are_assigned_in_due_order_for_the_next_second_only(rated: Rated) -> None:
    assert claim(rated).claimed.claims == {}, "which uses no slot"
    ids = overdue(rated, 30)
    granted = claim(rated)
    assert list(granted.claimed.claims) == ids[:10]
    begins = [granted.slots[id].begin_at for id in ids[:10]]
    assert begins[0] <= time.monotonic()
    assert [later - first for first, later in pairwise(begins)] == [pytest.approx(2.125 / 20)] * 9
    assert 0.5 < granted.wait_seconds < 0.6
    with CaptureQueriesContext(connection) as queries:
        nothing = claim(rated)
    assert (nothing.claimed.claims, nothing.slots) == ({}, {})
    assert "run_at" not in str(queries.captured_queries), "without any slot no row is read"
    assert Timeout.objects.filter(claimed_until__isnull=False).count() == 10


def test_rows_under_a_former_name_are_claimed_in_their_turn(declare: Declare) -> None:
    policy = declare(Order, name="now", aliases=("then",), limits=Limits(rate=RATE))
    ids = overdue(policy, 6)
    Timeout.objects.filter(pk__in=ids[::2]).update(policy="testapp.order.then")
    assert list(claim(policy).claimed.claims) == ids


@needs_row_locks
@needs_more_connections
@pytest.mark.dialect
@pytest.mark.parametrize("by", [None, "status"])
def test_locked_rows_hide_no_later_ones_and_two_workers_never_claim_at_once(by: str | None, declare: Declare) -> None:
    policy = declare(Order, name="rated", limits=Limits(rate=Rate(20, per=timedelta(seconds=2), by=by)))
    ids = overdue(policy, 10)
    with another_session(lambda: list(Timeout.objects.select_for_update().filter(pk__in=ids[:6]))):
        assert list(claim(policy, 2).slots) == ids[6:8]
    with another_session(lambda: list(RateShare.objects.select_for_update())):
        assert by or try_to_claim(policy, 5) is None


@pytest.mark.parametrize("atomic", [True, False])
def test_a_work_whose_slot_is_over_counts_no_attempt(declare: Declare, atomic: bool) -> None:
    begins = Begins()
    policy = declare(Order, begins, name="rated", atomic=atomic, limits=Limits(rate=RATE))
    [row] = due_orders(policy)
    work = Work(policy.label, (row.pk,), (row.object_id,), begin_by=time.monotonic() - 0.001)
    report = run(work, "default")
    assert (report.missed, report.done, report.untried) == (True, (), (row.pk,))
    row.refresh_from_db()
    assert (row.state, row.attempts, begins.ids) == ("pending", 0, [])
    assert "begin_by" not in work.as_dict(), "the clock of another process is another one"


def test_entries_of_a_line_are_removed_with_their_timeouts_and_outdated_ones_in_the_end(
    engine: Engine, rated: Rated
) -> None:
    ids, queue = overdue(rated, 3), engine.queue("default", 0)
    sources, lines = made_sources(engine), four_threads()
    taken = sources.take(lines, 100)
    assert (dict(taken.deliveries), set(taken.slots)) == (dict.fromkeys(ids, 1), set(ids))
    sources.resolve(ids, {})
    sources.flush()
    assert queue.stats().total == 0
    # As if a worker had died between the commit and the acknowledgement:
    Timeout.objects.filter(pk__in=ids).update(state="fired", cause="due", settled_at=clock.now(), slot_taken=None)
    queue.ensure(rated.label, [(id, 0) for id in ids])
    lines.refuse(rated, 0.0)
    sources.check_now()
    taken = sources.take(lines, 100)
    assert (set(taken.deliveries), dict(taken.slots)) == (set(ids), {})
    assert plan(taken.deliveries, "default", slots=taken.slots)[1].done == tuple(ids)


def test_a_worker_keeps_the_rate_and_the_order_and_fires_others_meanwhile_also_while_redis_fails_and_returns(
    own_redis: Any, declare: Declare, start_worker: StartWorker
) -> None:
    begins = Begins()
    policy = declare(Order, begins, name="rated", limits=Limits(rate=Rate(60, per=timedelta(seconds=3))))
    ids = overdue(policy, 90)
    start_worker(concurrency=2)
    wait_until(lambda: len(begins.ids) > 5, "some have fired")
    others = {row.pk for row in due_orders("remind", 30)}
    wait_until(lambda: not Timeout.objects.pending().filter(pk__in=others).exists(), "the others have fired")
    assert len(begins.ids) < len(ids), "they had to wait"
    assert Timeout.objects.pending().filter(policy=policy.label, claimed_until__isnull=False).count() <= 30
    own_redis.kill()
    wait_until(lambda: len(begins.ids) > 50, "more have fired")
    own_redis.start()
    wait_until(all_are("fired"), "all have fired")
    assert begins.most_within(3.0) <= 60
    assert max(abs(ids.index(id) - number) for number, id in enumerate(begins.ids)) <= 30


# Works that lose their slot, or that an executor or an error loses


class Silent:
    """An executor that runs nothing, and whose `withdraw` fails, or returns all but the first `running`."""

    def __init__(self, running: int | None = None) -> None:
        self.works: list[tuple[Work, Callable[..., None]]] = []
        self.withdrawals = 0
        self._running = running

    def submit(self, work: Work, done: Callable[..., None]) -> None:
        self.works.append((work, done))

    def withdraw(self) -> list[Work]:
        self.withdrawals += 1
        if self._running is None:
            raise OSError("the broker is down")
        waiting, self.works = [work for work, _ in self.works[self._running :]], self.works[: self._running]
        return waiting


def dispatch_to(executor: Any) -> Dispatch:
    return Dispatch(Worker(concurrency=1), executor)


def test_works_that_wait_for_a_slot_are_released_although_the_executor_fails(declare: Declare) -> None:
    """Otherwise a worker that stops would wait for them indefinitely."""
    [id] = overdue(declare(Order, name="rated", limits=Limits(rate=RATE)), 1)
    dispatch = dispatch_to(Silent())
    dispatch.add(Batch({id: 1}, slots={id: Slot(time.monotonic() + 60, time.monotonic() + 90)}))
    dispatch.release()
    assert dispatch.in_flight == 0


def test_while_a_handler_runs_for_long_what_waits_is_not_withdrawn_in_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = int(time.monotonic())  # whole seconds: sums of others are rounded
    rows = due_orders("remind", 4)
    dispatch = dispatch_to(executor := Silent(running=1))
    monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda: now))
    dispatch.add(Batch({rows[0].pk: 1}))
    now += 8
    dispatch.add(Batch({row.pk: 1 for row in rows[1:]}))
    now += 2
    assert [dispatch.release(after_seconds=10) for _ in range(100)] == [0] * 100
    assert executor.withdrawals == 1
    assert len(executor.works) > 1, "those that wait, again"
    now += 8
    assert dispatch.release(after_seconds=10) == 3, "they have waited for ten seconds"
    assert dispatch.in_flight == 1


def test_what_was_claimed_is_released_when_the_claim_of_the_next_policy_fails(declare: Declare) -> None:
    """Otherwise the worker would extend claims that it does not know of, and no worker would fire their rows."""
    first, second = (declare(Order, name=name, limits=Limits(rate=RATE)) for name in ("first", "second"))
    ids = overdue(first, 2)
    overdue(second, 2)
    sources = made_sources()

    def fail(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if second.label in (params or ()):
            raise OperationalError("deadlock")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail), pytest.raises(OperationalError, match="deadlock"):
        sources.take(four_threads(), 100)
    assert set(Timeout.objects.filter(pk__in=ids).values_list("claims", flat=True)) == {1}
    sources.flush()
    assert set(Timeout.objects.values_list("claims", flat=True)) == {0}
    assert list(claim(first).claimed.claims) == ids
