"""What each worker reads every few seconds, in one statement: clock, stopped and resumed policies, dead attempts."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_delayq import get_policy, operations
from django_delayq.ledger.controls import StopCache, StopChanges, stop_cache
from django_delayq.models import PolicyControl, Timeout
from django_delayq.sql.now import database_now
from tests.support.workers import due_orders

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]
SECOND = timedelta(seconds=1)


def stop_changes(cache: StopCache | None = None) -> StopChanges:
    with CaptureQueriesContext(connection) as queries:
        found = (cache or StopCache()).read_stop_changes("default")
    assert len([query for query in queries if "EXISTS" in query["sql"]]) == 1
    return found


def test_what_is_stopped_and_what_is_not_any_more() -> None:
    now = database_now("default")
    for policy, stop, until, changed in [
        ("a.b.paused", "paused", None, -60),
        ("a.b.until", "paused", now + 60 * SECOND, -60),
        ("a.b.held", "held", now - SECOND, -60),  # until its deadlines have been moved
        ("a.b.over", "paused", now - SECOND, -60),
        ("a.b.resumed", "", None, -5),
    ]:
        PolicyControl.objects.create(policy=policy, stop=stop, until=until, changed_at=now + changed * SECOND)
    cache = StopCache()
    found = stop_changes(cache)
    assert dict(found.stopped) == {"a.b.paused": None, "a.b.until": now + 60 * SECOND, "a.b.held": None}
    assert found.stopped_now() == found.stopped.keys()
    with CaptureQueriesContext(connection) as queries:
        assert cache.recent("default").stopped == found.stopped
    assert not queries, "the answer is cached like any other"


def test_an_attempt_is_dead_when_its_time_is_over() -> None:
    [row] = due_orders("send_outside")
    firing = Timeout.objects.filter(pk=row.pk)
    for seconds, is_dead in ((60, False), (-1, True)):
        firing.update(state="firing", slot_taken=None, run_at=database_now("default") + seconds * SECOND)
        assert stop_changes().has_expired is is_dead


@pytest.mark.django_db(transaction=True)
def test_what_a_transaction_has_changed_is_not_cached_before_it_commits() -> None:
    """It may roll back, and other threads fire meanwhile: what they skip in shadow mode never fires."""
    policy = get_policy("testapp.order.remind")
    with suppress(ZeroDivisionError), transaction.atomic():
        operations.shadow(policy, share=100, by="script:test")
        assert stop_cache.guards(policy, "default").shadow == 100
        raise ZeroDivisionError
    assert stop_cache.guards(policy, "default").shadow == 0
