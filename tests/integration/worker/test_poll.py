"""Without Redis: claims on rows of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.test.utils import CaptureQueriesContext

from django_delayq import Limits, Rate, clock, operations
from django_delayq.firing.planning import plan
from django_delayq.ledger import claiming
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.worker import Worker
from django_delayq.worker.lines import Lines
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sources.ledger import POLL_SECONDS, LedgerSource
from tests.e2e.races.sessions import impatient
from tests.integration.firing.conftest import locking, needs_row_locks
from tests.support.workers import Declare, due_orders
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("without_redis")]


class Poll(LedgerSource):
    """A source that is asked for so many of each line."""

    def __init__(self, queues: list[str] | None = None) -> None:
        super().__init__("default", queues, ClockSkew("default"))
        self.lines = Lines("default", 4, 0.5)

    def taken(self, room: int) -> Mapping[int, int]:
        """Return the deliveries of due timeouts, at most `room` of each line that has some."""
        limits = dict.fromkeys(self.due(self.lines), room)
        found = self.take(limits) if limits else {}
        return {id: count for of_line in found.values() for id, count in of_line.items()}

    @property
    def wait(self) -> float:
        return self.seconds_left(self.lines.declared(), ())


def lapse_claims() -> None:
    Timeout.objects.filter(claims__gt=0).update(claimed_until=clock.now() - timedelta(seconds=1))


def test_what_is_due_is_claimed_by_one_and_counted() -> None:
    rows = due_orders("remind", 3)
    due_orders("remind", 1, hours=1)
    assert Poll().taken(10) == {row.pk: 1 for row in rows}
    assert Poll().taken(10) == {}


def test_a_claim_that_lapsed_is_claimed_again_as_a_second_delivery() -> None:
    (row,) = due_orders("remind")
    Poll().taken(10)
    lapse_claims()
    assert Poll().taken(10) == {row.pk: 2}


def test_what_is_due_before_the_next_poll_is_claimed_and_waited_for(declare: Declare) -> None:
    """Otherwise each timeout would be late by half a second on average. Slots of a rate are for due rows alone."""
    (soon,), (later,) = due_orders("remind", 1, minutes=30), due_orders("remind", 1, hours=2)
    paced = declare(Order, name="paced", limits=Limits(rate=Rate(20, per=timedelta(seconds=1))))
    due_orders(paced, 1, minutes=30)
    source = Poll()
    assert source.ahead.total_seconds() > POLL_SECONDS
    source.ahead = timedelta(hours=1)  # as if the polls were so far apart
    assert source.taken(10) == {soon.pk: 1}
    works, report = plan({soon.pk: 1, later.pk: 1}, "default", source.ahead)
    assert ([work.ids for work in works], report.early) == ([(soon.pk,)], {soon.pk: soon.run_at})
    assert report.again == {later.pk: later.run_at}


def test_a_burst_claims_only_what_is_due() -> None:
    assert Worker(burst=True).sources.ledger.ahead == timedelta(0)


def test_the_longest_due_come_first_and_the_room_holds() -> None:
    first, second = due_orders("remind", 2)
    Timeout.objects.filter(pk=second.pk).update(run_at=clock.now() - timedelta(hours=1))
    one = Poll()
    assert one.taken(1) == {second.pk: 1}
    assert one.wait == 0.0
    assert one.taken(5) == {first.pk: 1}, "there was more, so it is asked at once"


def test_it_looks_once_a_second_when_there_is_no_more() -> None:
    one = Poll()
    assert one.taken(5) == {}
    due_orders("remind")
    assert one.taken(5) == {}
    assert 0 < one.wait <= 1
    one.check_now()
    assert one.taken(5)


def test_a_claim_given_back_is_not_counted_and_free_from_its_moment_on() -> None:
    now_free, later_free, moved = due_orders("remind", 3)
    one = Poll()
    one.taken(10)
    soon, later = clock.now(), clock.now() + timedelta(minutes=1)
    Timeout.objects.filter(pk=moved.pk).update(run_at=later)
    one.resolve((), {now_free.pk: soon, later_free.pk: later, moved.pk: later})
    one.flush()
    assert Poll().taken(10) == {now_free.pk: 1}
    moved.refresh_from_db()
    assert (moved.claims, moved.claimed_until) == (0, None), "it waits anyway, and may be moved forward"


def test_claims_are_extended_as_long_as_they_are_held() -> None:
    kept, done = due_orders("remind", 2)
    one = Poll()
    one.taken(10)
    before: dict[int, Any] = dict(Timeout.objects.values_list("pk", "claimed_until"))
    one.resolve([done.pk], {})
    one.extend()
    after: dict[int, Any] = dict(Timeout.objects.values_list("pk", "claimed_until"))
    assert after[kept.pk] > before[kept.pk]
    assert after[done.pk] == before[done.pk]
    one.resolve((), {kept.pk: clock.now()})
    one.flush()
    assert Poll().taken(10) == {kept.pk: 1}, "it is released under its new expiry"


@needs_row_locks
def test_giving_back_waits_for_nobody_and_is_made_good_later() -> None:
    """A locked row is released: a worker that waited for the lock would fire nothing else meanwhile."""
    held, other = due_orders("remind", 2)
    one = Poll()
    one.taken(10)
    one.resolve((), dict.fromkeys([held.pk, other.pk], clock.now()))
    with locking(held), impatient():
        one.flush()
        assert Poll().taken(10) == {other.pk: 1}
    one.flush()
    assert Poll().taken(10) == {held.pk: 1}, "the claim that was released late is not counted either"


@needs_row_locks
def test_extending_waits_for_no_handler_that_runs() -> None:
    """A running handler keeps its row locked: a worker that waited for it would lose its other claims."""
    runs, other = due_orders("remind", 2)
    one = Poll()
    one.taken(10)
    before: dict[int, Any] = dict(Timeout.objects.values_list("pk", "claimed_until"))
    with locking(runs), impatient():
        one.extend()
    after: dict[int, Any] = dict(Timeout.objects.values_list("pk", "claimed_until"))
    assert after[runs.pk] == before[runs.pk]
    assert after[other.pk] > before[other.pk]
    one.resolve((), dict.fromkeys([runs.pk, other.pk], clock.now()))
    one.flush()
    assert Poll().taken(10) == {runs.pk: 1, other.pk: 1}, "each is released under its own expiry"


def test_claims_that_were_extended_before_an_error_are_still_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many claims are extended in several transactions, and an error in one does not undo those before it."""
    monkeypatch.setattr(claiming, "CHUNK", 1)
    rows, one, extended = due_orders("remind", 2), Poll(), []
    one.taken(10)

    def fail(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and "claimed_until" in sql.partition("WHERE")[0]:
            extended.append(sql)
            if len(extended) > 1:
                raise OperationalError("deadlock")
        return execute(sql, *rest)

    with connection.execute_wrapper(fail), pytest.raises(OperationalError, match="deadlock"):
        one.extend()
    one.resolve((), {row.pk: clock.now() for row in rows})
    one.flush()
    assert set(Timeout.objects.values_list("claims", flat=True)) == {0}


def test_a_claim_of_a_row_that_is_gone_is_given_back_once() -> None:
    (row,) = due_orders("remind")
    one = Poll()
    one.taken(10)
    Timeout.objects.all().delete()
    one.resolve((), {row.pk: clock.now()})
    one.flush()
    with CaptureQueriesContext(connection) as queries:
        one.flush()
    assert not queries


def test_many_pollers_at_once_share_without_waiting_for_each_other() -> None:
    rows = due_orders("remind", 60)

    def drain(_: int) -> list[int]:
        try:
            one, found = Poll(), []
            while taken := one.taken(7):
                found += list(taken)
                one.check_now()
            return found
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        counts = Counter(id for found in pool.map(drain, range(4)) for id in found)
    assert counts == {row.pk: 1 for row in rows}


def test_a_look_that_finds_nothing_is_one_query_whatever_is_not_asked(declare: Declare) -> None:
    """Neither 200 policies, nor what is stopped or not declared, cost another one."""
    stopped, novel = due_orders("remind", 3), declare(Order, name="novel")
    due_orders(novel, 3)
    registry.remove(novel)
    operations.pause("testapp.order.remind", by="script:test")
    for number in range(200):
        declare(Order, name=f"policy_{number}")
    one = Poll()
    one.taken(10)
    for _ in range(3):
        one.check_now()
        with CaptureQueriesContext(connection) as queries:
            assert one.taken(10) == {}
        assert [query["sql"].split()[0] for query in queries] == ["SELECT"]
    operations.resume("testapp.order.remind", by="script:test")
    one.check_now()
    assert one.taken(10) == {row.pk: 1 for row in stopped}
