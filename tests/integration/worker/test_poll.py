"""Without Redis: claims on rows of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from django_delayq import Limits, Rate, clock
from django_delayq.conf import get_settings
from django_delayq.firing.planning import plan
from django_delayq.ledger import claiming
from django_delayq.models import Timeout
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

    def __init__(self) -> None:
        super().__init__("default", None, ClockSkew("default"))
        self.lines = Lines("default", 4, 0.5)

    def taken(self, room: int = 10) -> Mapping[int, int]:
        """Return the deliveries of due timeouts, at most `room` of each line that has some."""
        limits = dict.fromkeys(self.due(self.lines), room)
        found = self.take(limits) if limits else {}
        return {id: count for of_line in found.values() for id, count in of_line.items()}

    @property
    def wait(self) -> float:
        return self.seconds_left(self.lines.declared(), ())

    def give_back(self, *rows: Timeout) -> None:
        """Release the claims on these rows, from now on."""
        self.resolve((), {row.pk: clock.now() for row in rows})
        self.flush()


def expiries() -> dict[int, datetime | None]:
    return dict(Timeout.objects.values_list("pk", "claimed_until"))


def test_what_is_due_is_claimed_by_one_and_counted_and_again_when_its_claim_has_lapsed() -> None:
    rows = due_orders("remind", 3)
    due_orders("remind", 1, hours=1)
    assert Poll().taken() == {row.pk: 1 for row in rows}
    claimed = Timeout.objects.filter(claimed_until__lte=clock.now() + get_settings().lease, claims=1)
    assert set(claimed) == set(rows)
    assert Poll().taken() == {}
    Timeout.objects.filter(claims__gt=0).update(claimed_until=clock.now() - timedelta(seconds=1))
    assert Poll().taken() == {row.pk: 2 for row in rows}


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
