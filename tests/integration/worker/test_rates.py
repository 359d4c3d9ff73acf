"""`Limits(rate=...)`: a worker claims as many as may begin soon, in due order; others wait without a lease."""

from __future__ import annotations

import time
from bisect import bisect_left
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq import Limits, Rate, TimeoutPolicy, clock
from django_delayq.engine.engine import Engine
from django_delayq.firing import Work, plan, run, works
from django_delayq.ledger import claiming
from django_delayq.ledger.claiming import Slot
from django_delayq.models import RateShare, Timeout
from django_delayq.redis_clients import get_worker_engine
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
)
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
RATE = Rate(20, per=timedelta(seconds=2))
SLOW = Rate(1, per=timedelta(hours=1))
Rated = TimeoutPolicy[Any]


@pytest.fixture
def rated(declare: Declare) -> Rated:
    return declare(Order, name="rated", limits=Limits(rate=RATE))


class Begins:
    """A handler that notes when it began, with which timeouts."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ids: list[int] = []

    def __call__(self, _: Any, timeouts: Any) -> None:
        listed = timeouts if isinstance(timeouts, list) else [timeouts]
        self.at += [time.monotonic()] * len(listed)
        self.ids += [timeout.pk for timeout in listed]

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
@pytest.mark.parametrize("by", [None, "status"])
def test_locked_rows_hide_no_later_ones_and_two_workers_never_claim_at_once(by: str | None, declare: Declare) -> None:
    policy = declare(Order, name="rated", limits=Limits(rate=Rate(20, per=timedelta(seconds=2), by=by)))
    ids = overdue(policy, 10)
    with another_session(lambda: list(Timeout.objects.select_for_update().filter(pk__in=ids[:6]))):
        assert list(claim(policy, 2).slots) == ids[6:8]
    with another_session(lambda: list(RateShare.objects.select_for_update())):
        assert by or try_to_claim(policy, 5) is None


def test_an_entry_without_a_slot_comes_again_in_a_second_or_when_it_is_due(rated: Rated) -> None:
    [now], [soon], [other] = due_orders(rated), due_orders(rated, after=timedelta(seconds=30)), due_orders("remind")
    works, report = plan({row.pk: 1 for row in (now, soon, other)}, "default", timedelta(minutes=1), {})
    assert [work.ids for work in works] == [(other.pk,)]
    assert report.now is not None
    assert report.again == {now.pk: report.now + timedelta(seconds=1), soon.pk: soon.run_at}
    [work], _ = plan({now.pk: 2}, "default", slots={now.pk: Slot(1.0, 2.0)})
    assert (work.suspect, work.begin_at, work.begin_by) == (True, 1.0, 2.0), "a suspect has a slot, too"


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
    moved = SimpleNamespace(monotonic=lambda: time.monotonic() + 600.0 * len(seen), thread_time=time.thread_time)
    monkeypatch.setattr(works, "time", moved)

    def handler(_: Any, timeouts: list[Timeout]) -> None:
        seen.append(len(timeouts))
        if len(timeouts) > 1:
            raise ValueError

    policy = declare(Order, handler, name="rated", batch=3, limits=Limits(rate=RATE))
    rows = due_orders(policy, 3)
    ids, objects = tuple(row.pk for row in rows), tuple(row.object_id for row in rows)
    work = Work(policy.label, ids, objects, begin_by=time.monotonic() + 300)
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


@pytest.mark.usefixtures("source")
def test_until_its_next_slot_a_policy_is_not_asked(declare: Declare) -> None:
    """Its entries in Redis stay there: they are not outdated, as their rows wait."""
    policy = declare(Order, name="rated", limits=Limits(rate=SLOW))
    ids, engine = overdue(policy, 2), get_worker_engine("default")
    sources, lines = made_sources(engine), four_threads()
    if engine is not None:
        engine.queue("default", 0).ensure(policy.label, [(id, 0) for id in ids])
    assert set(sources.take(lines, 100).deliveries) == {ids[0]}
    assert policy.label not in lines.declared()
    assert lines.seconds_left > 3000, "its next slot is in an hour"
    if engine is not None:
        lines.refuse(policy, 0.0)
        sources.check_now()
    sources.ledger.check_now()
    assert sources.take(lines, 100).deliveries == {}
    with CaptureQueriesContext(connection) as queries:
        assert sources.take(lines, 100).deliveries == {}
    assert not queries


def test_a_worker_that_has_enough_leaves_slots_and_what_waits_for_slots_leaves_room_to_others(rated: Rated) -> None:
    overdue(rated, 20)
    busy, full, crowded = (four_threads() for _ in range(3))
    busy.in_flight[rated.label] = 1
    assert len(made_sources().take(busy, 100).deliveries) == 3
    assert len(made_sources().take(four_threads(), 2).deliveries) == 2
    full.in_flight[rated.label] = 4
    assert made_sources().take(full, 100).deliveries == {}
    assert rated.label not in full.declared(), "it is asked again a little later"
    due_orders("remind", 4)
    crowded.in_flight[rated.label] = 30
    assert len(made_sources().take(crowded, 100).deliveries) == 4


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
