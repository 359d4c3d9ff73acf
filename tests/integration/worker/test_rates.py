"""`Limits(rate=...)`: a worker claims as many as may begin soon, in due order; others wait without a lease."""

from __future__ import annotations

import time
from bisect import bisect_left
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq import Limits, Rate, Retry, TimeoutPolicy, clock, operations
from django_delayq.engine.engine import Engine
from django_delayq.firing import Work, plan, run, running
from django_delayq.firing.state import firing_state
from django_delayq.ledger import claiming
from django_delayq.ledger.claiming import Slot
from django_delayq.models import RateShare, Timeout
from django_delayq.worker import Worker
from django_delayq.worker.lines import Lines
from django_delayq.worker.servers import ClockSkew, RedisHealth
from django_delayq.worker.sources.ledger import SlotQueue
from django_delayq.worker.sources.redis import Sources
from tests.integration.firing.conftest import another_session, needs_row_locks
from tests.support.waiting import wait_until
from tests.support.workers import (
    Declare,
    StartWorker,
    all_are,
    due_orders,
    needs_more_connections,
    queue_in_redis,
    states,
)
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
RATE = Rate(20, per=timedelta(seconds=2))
FAST = Rate(60, per=timedelta(seconds=2))
PERIOD, MOST = 2.0, 60
STEADY = Rate(60, per=timedelta(seconds=3))
"""A busy machine loses fewer slots of a longer period."""
WITH_REDIS = pytest.mark.parametrize("source", ["redis"], indirect=True)
"""A timeout with a rate is claimed from the ledger, with Redis and without."""
SLOW = Rate(1, per=timedelta(hours=1))
Rated = TimeoutPolicy[Any]


@pytest.fixture(autouse=True)
def without_experience() -> None:
    """No test inherits that a batch of the policy has failed in another one."""
    firing_state.forget()


@pytest.fixture
def rated(declare: Declare) -> Rated:
    return declare(Order, name="rated", limits=Limits(rate=RATE))


class Begins:
    """A handler that notes when it began, with which timeouts."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.at: list[float] = []
        self.ids: list[int] = []
        self._error = error

    def __call__(self, _: Any, timeouts: Any) -> None:
        listed = timeouts if isinstance(timeouts, list) else [timeouts]
        self.at += [time.monotonic()] * len(listed)
        self.ids += [timeout.pk for timeout in listed]
        if self._error is not None:
            raise self._error

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
    minute = timedelta(minutes=1)
    granted = claiming.claim_in_slots(policy, "default", None, limit=limit, seconds=minute, preparation=0.0)
    assert granted is not None
    return granted


def made_sources() -> Sources:
    """Both sources of a worker without Redis."""
    return Sources(RedisHealth(None), [], None, "default", ClockSkew("default"))


def test_slots_are_assigned_in_due_order_for_the_next_second_only(rated: Rated) -> None:
    ids = overdue(rated, 30)
    granted = claim(rated)
    assert list(granted.claimed.claims) == ids[:10]
    begins = [granted.slots[id].begin_at for id in ids[:10]]
    assert [later - first for first, later in pairwise(begins)] == [pytest.approx(2.125 / 20)] * 9
    assert 0.5 < granted.wait_seconds < 0.6
    with CaptureQueriesContext(connection) as queries:
        nothing = claim(rated)
    assert (nothing.claimed.claims, nothing.slots) == ({}, {})
    assert "run_at" not in str(queries.captured_queries), "without any slot no row is read"
    assert Timeout.objects.filter(claimed_until__isnull=False).count() == 10


def test_the_next_slots_follow_the_last_ones(rated: Rated) -> None:
    ids = overdue(rated, 10)
    granted = [*(claim(rated, 1) for _ in ids[:4]), claim(rated, 50)]
    assert list(granted[-1].claimed.claims) == ids[4:]
    begins = [each.slots[timeout_id].begin_at for each, timeout_id in zip(granted, ids, strict=False)]
    gaps = sorted(later - earlier for earlier, later in pairwise(begins))  # a pause of this process changes two of them
    assert gaps[1] == pytest.approx(2.125 / 20, abs=0.05), "an interval, read by the clock of the database"


def test_a_slot_is_used_up_only_by_a_timeout(rated: Rated) -> None:
    for _ in range(3):
        assert claim(rated).claimed.claims == {}
    [row] = due_orders(rated)
    assert claim(rated).slots[row.pk].begin_at <= time.monotonic()


def test_a_batch_shares_a_slot_and_counts_each_object(declare: Declare) -> None:
    policy = declare(Order, name="rated", batch=15, limits=Limits(rate=RATE))
    ids = overdue(policy, 30)
    granted = claim(policy)
    slots = granted.slots
    assert (list(slots), len(set(slots.values()))) == (ids[:10], 1), "20 in two seconds: works of ten"
    [work], report = plan(granted.claimed.claims, "default", slots=slots)
    assert (work.ids, report.done) == (tuple(ids[:10]), ())
    assert (work.begin_at, work.begin_by) == slots[ids[0]][:2]


def test_rows_under_a_former_name_are_claimed_in_their_turn(declare: Declare) -> None:
    policy = declare(Order, name="now", aliases=("then",), limits=Limits(rate=RATE))
    ids = overdue(policy, 6)
    Timeout.objects.filter(pk__in=ids[::2]).update(policy="testapp.order.then")
    assert list(claim(policy).claimed.claims) == ids


@needs_row_locks
@needs_more_connections
@pytest.mark.dialect
def test_two_workers_never_claim_at_the_same_time(rated: Rated) -> None:
    overdue(rated, 3)
    assert len(claim(rated, 1).slots) == 1
    with another_session(lambda: list(RateShare.objects.select_for_update())):
        minute = timedelta(minutes=1)
        assert claiming.claim_in_slots(rated, "default", None, limit=5, seconds=minute, preparation=0.0) is None


def test_an_entry_without_a_slot_comes_again_in_a_second_or_when_it_is_due(rated: Rated) -> None:
    now, soon = due_orders(rated)[0], due_orders(rated, after=timedelta(seconds=30))[0]
    other = due_orders("remind")[0]
    works, report = plan({row.pk: 1 for row in (now, soon, other)}, "default", timedelta(minutes=1), {})
    assert [work.ids for work in works] == [(other.pk,)]
    assert report.now is not None
    assert report.again == {now.pk: report.now + timedelta(seconds=1), soon.pk: soon.run_at}


def test_a_suspect_and_a_slot_go_together(rated: Rated) -> None:
    [row] = due_orders(rated)
    [work], _ = plan({row.pk: 2}, "default", slots={row.pk: Slot(1.0, 2.0)})
    assert (work.suspect, work.begin_at, work.begin_by) == (True, 1.0, 2.0)


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


def test_a_work_that_has_begun_fires_all_of_its_timeouts(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of a batch that failed are fired one by one, which may take longer than the slot."""
    seen: list[int] = []
    monkeypatch.setattr(running, "WORK_SECONDS", 600.0)

    def handler(_: Any, timeouts: list[Timeout]) -> None:
        seen.append(len(timeouts))
        time.sleep(max(0.0, work.begin_by - time.monotonic()))
        if len(timeouts) > 1:
            raise ValueError

    policy = declare(Order, handler, name="rated", batch=3, limits=Limits(rate=RATE))
    rows = due_orders(policy, 3)
    ids, objects = tuple(row.pk for row in rows), tuple(row.object_id for row in rows)
    work = Work(policy.label, ids, objects, begin_by=time.monotonic() + 3)
    assert sorted(run(work, "default").fired) == sorted(ids)
    assert seen == [3, 1, 1, 1]


def test_works_keep_their_order_in_whichever_slot_they_begin() -> None:
    now = time.monotonic()
    works = [
        Work("p", (9 - number,), ("1",), begin_at=now + at, begin_by=now + at + 50)
        for number, at in enumerate((-200.0, -100.0, -25.0, -20.0, 500.0))
    ]
    queue = SlotQueue()
    for work in works:
        queue.add(work)
    begun = list(queue.ready(0.0))
    assert [work.ids for work in begun] == [(9,), (8,)], "two slots are over, two have come"
    assert [work.begin_at for work in begun] == [works[2].begin_at, works[3].begin_at]
    queue.put_back(works[0])
    assert queue.without_slot() == []
    assert [work.ids for work in queue.ready(600.0)] == [(9,)], "the one that came back is the first"
    assert [work.ids for work in queue.without_slot()] == [(7,), (6,), (5,)]
    assert queue.next_at == float("inf")


def test_until_its_next_slot_a_policy_is_not_asked(declare: Declare) -> None:
    policy = declare(Order, name="rated", limits=Limits(rate=SLOW))
    overdue(policy, 2)
    sources, lines = made_sources(), Lines("default", 4, 0.5)
    assert len(sources.take(lines, 100).deliveries) == 1
    assert policy.label not in lines.declared()
    assert lines.seconds_left > 3000, "its next slot is in an hour"
    sources.ledger.check_now()
    assert sources.take(lines, 100).deliveries == {}
    with CaptureQueriesContext(connection) as queries:
        assert sources.take(lines, 100).deliveries == {}
    assert not queries


def test_until_its_next_slot_entries_of_a_policy_stay_in_redis(engine: Engine, declare: Declare) -> None:
    """They are not outdated: their rows wait."""
    policy = declare(Order, name="rated", limits=Limits(rate=SLOW))
    ids = overdue(policy, 10)
    worker, lines = Worker(concurrency=1), Lines("default", 4, 0.5)
    engine.queue("default", 0).ensure(policy.label, [(id, 0) for id in ids])
    worker._connect(engine)
    worker.redis.probe_at_start(worker.queues)
    sources = worker.sources
    assert set(sources.take(lines, 100).deliveries) == {ids[0]}
    lines.refuse(policy, 0.0)
    sources.check_now()
    assert sources.take(lines, 100).deliveries == {}


@needs_row_locks
@needs_more_connections
@pytest.mark.dialect
@pytest.mark.parametrize("by", [None, "status"])
def test_rows_that_others_have_locked_hide_no_later_ones(by: str | None, declare: Declare) -> None:
    policy = declare(Order, name="rated", limits=Limits(rate=Rate(20, per=timedelta(seconds=2), by=by)))
    ids = overdue(policy, 10)
    with another_session(lambda: list(Timeout.objects.select_for_update().filter(pk__in=ids[:6]))):
        assert list(claim(policy, 2).slots) == ids[6:8]


def test_a_worker_that_has_enough_leaves_slots_to_others(rated: Rated) -> None:
    overdue(rated, 20)
    busy, full = (Lines("default", 4, 0.5) for _ in range(2))
    busy.in_flight[rated.label] = 1
    assert len(made_sources().take(busy, 100).deliveries) == 3
    assert len(made_sources().take(Lines("default", 4, 0.5), 2).deliveries) == 2
    full.in_flight[rated.label] = 4
    assert made_sources().take(full, 100).deliveries == {}
    assert rated.label not in full.declared(), "it is asked again a little later"


def test_what_waits_for_slots_takes_no_room_from_others(rated: Rated) -> None:
    due_orders("remind", 4)
    lines = Lines("default", 4, 0.5)
    lines.in_flight[rated.label] = 30
    assert len(made_sources().take(lines, 100).deliveries) == 4


def test_a_stopped_policy_uses_no_slots(rated: Rated) -> None:
    overdue(rated, 4)
    operations.pause(rated, by="script:test")
    assert made_sources().take(Lines("default", 4, 0.5), 100).deliveries == {}
    assert not RateShare.objects.exists()
    operations.resume(rated, by="script:test")
    assert len(made_sources().take(Lines("default", 4, 0.5), 100).deliveries) == 4


def test_entries_of_a_line_are_removed_with_their_timeouts_and_outdated_ones_in_the_end(
    engine: Engine, rated: Rated
) -> None:
    ids = overdue(rated, 3)
    queue = engine.queue("default", 0)
    health = RedisHealth(engine)
    sources, lines = Sources(health, ["default"], None, "default", ClockSkew("default")), Lines("default", 4, 0.5)
    health.probe_at_start(["default"])
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


def test_a_worker_keeps_the_rate_and_the_order_and_fires_others_meanwhile(
    source: str, declare: Declare, start_worker: StartWorker
) -> None:
    begins = Begins()
    policy = declare(Order, begins, name="rated", limits=Limits(rate=STEADY))
    ids = overdue(policy, 90)
    start_worker(concurrency=2)
    wait_until(lambda: len(begins.ids) > 5, "some have fired")
    others = {row.pk for row in due_orders("remind", 30)}
    wait_until(lambda: not Timeout.objects.pending().filter(pk__in=others).exists(), "the others have fired")
    assert len(begins.ids) < len(ids), "they had to wait"
    assert Timeout.objects.pending().filter(policy=policy.label, claimed_until__isnull=False).count() <= 30
    wait_until(all_are("fired"), "all have fired")
    assert begins.most_within(3.0) <= 60
    if source == "redis":
        wait_until(lambda: queue_in_redis().stats().total == 0, "Redis has no entry any more")
    assert max(abs(ids.index(id) - number) for number, id in enumerate(begins.ids)) <= 30


@WITH_REDIS
def test_a_failed_attempt_counts_as_well(source: str, declare: Declare, start_worker: StartWorker) -> None:
    begins = Begins(ValueError("no"))
    policy = declare(Order, begins, name="rated", retry=Retry([0, 0, 0]), limits=Limits(rate=FAST))
    overdue(policy, 20)
    start_worker(concurrency=4)
    wait_until(all_are("dead"), "all are dead")
    assert len(begins.at) >= 80, "more if a row is locked briefly when its failure is to be recorded"
    assert begins.most_within(PERIOD) <= MOST


@WITH_REDIS
@pytest.mark.parametrize(
    ("options", "most_calls"), [({"batch": 8}, 20), ({"atomic": False}, 75)], ids=["in batches", "outside"]
)
def test_other_ways_to_fire_keep_the_rate_too(
    source: str, declare: Declare, start_worker: StartWorker, options: dict[str, Any], most_calls: int
) -> None:
    begins = Begins()
    overdue(declare(Order, begins, name="rated", limits=Limits(rate=FAST), **options), 75)
    start_worker(concurrency=2)
    wait_until(all_are("fired"), "all have fired")
    assert begins.most_within(PERIOD) <= MOST
    assert len(set(begins.at)) <= most_calls


@needs_more_connections
def test_a_timeout_that_falls_due_meanwhile_is_on_time(
    source: str, declare: Declare, start_worker: StartWorker
) -> None:
    begins = Begins()
    policy = declare(Order, begins, name="rated", limits=Limits(rate=FAST))
    start_worker(concurrency=2)
    [remind] = due_orders("remind")
    wait_until(lambda: states().get("fired"), "the worker runs")
    rows = due_orders(policy, 3, seconds=1)
    wait_until(all_are("fired"), "all have fired")
    assert [row.pk for row in rows] == sorted(begins.ids), "one that loses its slot gets a later one"
    late = Timeout.objects.get(pk=rows[0].pk).lateness()
    assert late is not None and late < 10, remind


@WITH_REDIS
def test_a_worker_that_stops_releases_what_it_has_claimed(
    source: str, declare: Declare, start_worker: StartWorker
) -> None:
    begins = Begins()
    policy = declare(Order, begins, name="rated", limits=Limits(rate=RATE))
    overdue(policy, 40)
    worker = start_worker(concurrency=2)
    wait_until(lambda: begins.ids, "one has fired")
    worker.stop()
    pending = Timeout.objects.pending()
    assert pending.count() > 10
    assert set(pending.values_list("claims", "attempts")) == {(0, 0)}
    assert claim(policy).wait_seconds <= 1.0


def test_a_policy_that_is_resumed_goes_on_at_its_rate(source: str, declare: Declare, start_worker: StartWorker) -> None:
    begins = Begins()
    policy = declare(Order, begins, name="rated", limits=Limits(rate=FAST))
    overdue(policy, 75)
    operations.pause(policy, by="script:test")
    start_worker(concurrency=2)
    due_orders("remind")
    wait_until(lambda: states().get("fired"), "the worker runs")
    assert begins.ids == []
    operations.resume(policy, by="script:test")
    wait_until(all_are("fired"), "all have fired")
    assert begins.most_within(PERIOD) <= MOST


def test_the_rate_is_kept_while_redis_fails_and_returns(
    own_redis: Any, declare: Declare, start_worker: StartWorker
) -> None:
    begins = Begins()
    policy = declare(Order, begins, name="rated", limits=Limits(rate=STEADY))
    overdue(policy, 110)
    for _ in range(2):
        start_worker(concurrency=1)
    wait_until(lambda: len(begins.ids) > 30, "some have fired")
    own_redis.kill()
    wait_until(lambda: len(begins.ids) > 60, "more have fired")
    own_redis.start()
    wait_until(all_are("fired"), "all have fired")
    assert begins.most_within(3.0) <= 60
    assert 5 <= 109 / (begins.at[-1] - begins.at[0]) <= 20
