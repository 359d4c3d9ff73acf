"""What a worker gets from its sources, and releases: entries of lines in Redis, or claims on rows of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_delayq import Limits, Rate, clock
from django_delayq.conf import get_settings
from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineError
from django_delayq.firing.planning import plan
from django_delayq.ledger import claiming
from django_delayq.models import Timeout
from django_delayq.worker import Worker
from django_delayq.worker.lines import Lines
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sources.ledger import POLL_SECONDS, LedgerSource
from django_delayq.worker.sources.redis import RedisSource
from tests.e2e.races.sessions import impatient
from tests.engine.redis_process import RedisProcess
from tests.integration.firing.conftest import locking, needs_row_locks
from tests.support.workers import Declare, due_orders, worker_engine
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
in_the_ledger = pytest.mark.usefixtures("without_redis")
REMIND, LINGER, UNPAID = (f"testapp.order.{name}" for name in ("remind", "linger", "cancel_unpaid"))


class Transfer(RedisSource):
    """A source that is asked for so many of each line that may have due entries."""

    def __init__(self, engine: Engine, *queues: str) -> None:
        super().__init__(engine, queues, ClockSkew("default"))
        self.lines = Lines("default", 4, 0.5)

    def taken(self, room: int = 10) -> dict[int, int]:
        """Return the deliveries, at most `room` of each line."""
        found = self.take(dict.fromkeys(self.due(self.lines), room))
        return {id: count for of_line in found.values() for id, count in of_line.items()}


def fill(engine: Engine, queue: str, ids: Iterable[int], due_ms: int = 0, line: str = REMIND) -> None:
    for id in ids:
        engine.queue(queue, engine.shard_of(id)).ensure(line, [(id, due_ms)])


def test_what_one_queue_has_leased_is_released_when_the_next_queue_fails(
    own_redis: RedisProcess, settings: Settings
) -> None:
    """Otherwise the worker would extend leases that it does not know of, and no worker would fire their timeouts."""
    with own_redis.client() as client:
        client.acl_setuser("shop", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"])
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://shop:secret@127.0.0.1:{own_redis.port}/0"}
        with worker_engine() as engine:
            fill(engine, "a", range(1, 4))
            fill(engine, "b", [4])
            one = Transfer(engine, "b", "a")
            assert list(one.due(one.lines)) == [REMIND]
            client.acl_setuser("shop", reset_keys=True, keys=["*{a.0}*"])
            with pytest.raises(EngineError):
                one.take({REMIND: 10})
            assert engine.queue("a", 0).stats().leased == 3
            one.flush()
            assert Transfer(engine, "a").taken() == {1: 1, 2: 1, 3: 1}


# The ledger


class Poll(LedgerSource):
    """A source that is asked for so many of each line."""

    def __init__(self) -> None:
        super().__init__("default", None, ClockSkew("default"))
        self.lines = Lines("default", 4, 0.5)

    def taken(self, room: int = 10) -> Mapping[int, int]:
        """Return the deliveries of due timeouts, at most `room` of each line that has some."""
        limits = dict.fromkeys(self.due(self.lines), room)
        found = self.take(limits) if limits else {}
        return {id: count for of_line in found.values() for id, count in of_line.items()}

    def give_back(self, *rows: Timeout) -> None:
        """Release the claims on these rows, from now on."""
        self.resolve((), {row.pk: clock.now() for row in rows})
        self.flush()


def expiries() -> dict[int, datetime | None]:
    return dict(Timeout.objects.values_list("pk", "claimed_until"))


@in_the_ledger
def test_what_is_due_is_claimed_by_one_and_counted_and_again_when_its_claim_has_lapsed() -> None:
    rows = due_orders("remind", 3)
    due_orders("remind", 1, hours=1)
    assert Poll().taken() == {row.pk: 1 for row in rows}
    claimed = Timeout.objects.filter(claimed_until__lte=clock.now() + get_settings().lease, claims=1)
    assert set(claimed) == set(rows)
    assert Poll().taken() == {}
    Timeout.objects.filter(claims__gt=0).update(claimed_until=clock.now() - timedelta(seconds=1))
    assert Poll().taken() == {row.pk: 2 for row in rows}


@in_the_ledger
def test_what_is_due_before_the_next_poll_is_claimed_and_waited_for(declare: Declare) -> None:
    """Otherwise each timeout would be late by half a second on average. Slots of a rate are for due rows alone."""
    (soon,), (later,) = due_orders("remind", 1, minutes=30), due_orders("remind", 1, hours=2)
    due_orders(declare(Order, name="paced", limits=Limits(rate=Rate(20, per=timedelta(seconds=1)))), 1, minutes=30)
    source = Poll()
    assert source.ahead.total_seconds() > POLL_SECONDS
    source.ahead = timedelta(hours=1)  # as if the polls were so far apart
    assert source.taken() == {soon.pk: 1}
    works, report = plan({soon.pk: 1, later.pk: 1}, "default", source.ahead)
    assert ([work.ids for work in works], report.early) == ([(soon.pk,)], {soon.pk: soon.run_at})
    assert report.again == {later.pk: later.run_at}
    assert Worker(burst=True).sources.ledger.ahead == timedelta(0), "a burst claims due rows only"


@in_the_ledger
def test_a_claim_given_back_is_not_counted_and_free_from_its_moment_on() -> None:
    now_free, later_free, moved, gone = due_orders("remind", 4)
    one = Poll()
    one.taken()
    soon, later = clock.now(), clock.now() + timedelta(minutes=1)
    Timeout.objects.filter(pk=moved.pk).update(run_at=later)
    Timeout.objects.filter(pk=gone.pk).delete()
    one.resolve((), {now_free.pk: soon, later_free.pk: later, moved.pk: later, gone.pk: soon})
    one.flush()
    assert Poll().taken() == {now_free.pk: 1}
    moved.refresh_from_db()
    assert (moved.claims, moved.claimed_until) == (0, None), "it waits anyway, and may be moved forward"
    with CaptureQueriesContext(connection) as queries:
        one.flush()
    assert not queries, "the claim of a row that is gone is released once, too"


@in_the_ledger
def test_claims_are_extended_as_long_as_they_are_held() -> None:
    kept, done = due_orders("remind", 2)
    one = Poll()
    one.taken()
    before: Any = expiries()
    one.resolve([done.pk], {})
    one.extend()
    after: Any = expiries()
    assert after[kept.pk] > before[kept.pk]
    assert after[done.pk] == before[done.pk]
    one.give_back(kept)
    assert Poll().taken() == {kept.pk: 1}, "it is released under its new expiry"


@in_the_ledger
@needs_row_locks
def test_giving_back_and_extending_wait_for_nobody_and_are_made_good_later() -> None:
    """A worker that waited for a locked row, as that of a running handler, would fire nothing else meanwhile."""
    held, other = due_orders("remind", 2)
    one = Poll()
    one.taken()
    before: Any = expiries()
    with locking(held), impatient():
        one.extend()
        after: Any = expiries()
        assert after[held.pk] == before[held.pk]
        assert after[other.pk] > before[other.pk]
        one.give_back(held, other)
        assert Poll().taken() == {other.pk: 1}
    one.flush()
    assert Poll().taken() == {held.pk: 1}, "the claim that was released late is not counted either"


@in_the_ledger
def test_claims_that_were_extended_before_an_error_are_still_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many claims are extended in several transactions, and an error in one does not undo those before it."""
    monkeypatch.setattr(claiming, "CHUNK", 1)
    rows, one, extended = due_orders("remind", 2), Poll(), []
    one.taken()

    def fail(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and "claimed_until" in sql.partition("WHERE")[0]:
            extended.append(sql)
            if len(extended) > 1:
                raise OperationalError("deadlock")
        return execute(sql, *rest)

    with connection.execute_wrapper(fail), pytest.raises(OperationalError, match="deadlock"):
        one.extend()
    one.give_back(*rows)
    assert set(Timeout.objects.values_list("claims", flat=True)) == {0}
