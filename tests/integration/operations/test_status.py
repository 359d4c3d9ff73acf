"""The content of the snapshot, its limits, and that it lists each running worker."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import Limits, Rate
from django_delayq.ledger import controls, search
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.monitoring import reports
from django_delayq.monitoring import snapshot as status
from django_delayq.operations import pause
from django_delayq.redis_clients import forget_engine, get_engine
from django_delayq.worker import Worker
from tests.integration.operations.conftest import BY, as_if, dead, pending
from tests.support.lines import remove_ids
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, due_orders
from tests.testapp.models import Order

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def of(label: str, hours: bool = True) -> status.PolicyStatus:
    (found,) = [each for each in status.policy_statuses(hours=hours) if each.label == label]
    return found


def test_a_policy_is_counted_by_what_its_rows_do() -> None:
    now = timezone.now()
    for minutes in (30, 90, 95, 60 * 30):
        pending(Order.objects.create(), minutes=minutes)
    as_if(pending(Order.objects.create()), "pending", run_at=now - HOUR)
    pending(Order.objects.create(), seconds=0)
    dead(Order.objects.create())
    for late in (1, 2, 30):
        due_at = now - HOUR
        as_if(
            pending(Order.objects.create()),
            "fired",
            "due",
            due_at=due_at,
            run_at=due_at,
            settled_at=due_at + timedelta(seconds=late),
        )
    as_if(pending(Order.objects.create(), minutes=40), "pending", attempts=1)
    days_ago = now - timedelta(days=3)
    as_if(pending(Order.objects.create()), "fired", "due", run_at=days_ago, settled_at=days_ago)
    as_if(pending(Order.objects.create()), "skipped", "condition", run_at=now - HOUR)
    found = of("testapp.order.remind")
    assert (found.pending.value, found.due.value, found.overdue.value) == (7, 2, 1)
    assert found.failing.value == 1, "a dead row with attempts, or one that fired after some, is not failing"
    assert (found.dead.value, found.fired.value, found.skipped.value, found.firing.value) == (1, 3, 1, 0)
    assert (found.lag_p50, found.lag_p99) == (2.0, 30.0)
    assert found.oldest_due_at == now - HOUR
    assert [count.value for count in found.hours] == [2, 2, *[0] * 22]
    assert of("testapp.order.linger").pending == search.NOTHING
    assert of("testapp.order.remind", hours=False).hours == ()


def test_the_hours_of_a_policy_with_very_many_pending_timeouts_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_COUNT", 2)
    for minutes in (10, 20, 30, 90, 150, 160):
        pending(Order.objects.create(), minutes=minutes)
    pending(Order.objects.create(), "linger", minutes=70)
    found, other = of("testapp.order.remind"), of("testapp.order.linger")
    assert (str(found.pending), [str(count) for count in found.hours[:4]]) == ("2+", ["2+", "1", "2", "0"])
    assert (str(other.pending), [str(count) for count in other.hours[:3]]) == ("1", ["0", "1", "0"])


@pytest.mark.parametrize(("examined", "cap", "fired"), [(5, 5, "3"), (3, 5, "3"), (2, 5, "3"), (2, 2, "2+")])
def test_what_fired_more_than_a_day_late_is_counted_in_the_day_in_which_it_fired(
    monkeypatch: pytest.MonkeyPatch, declare: Any, examined: int, cap: int, fired: str
) -> None:
    declare(Order, name="nudge", aliases=["remind_before"])
    monkeypatch.setattr(reports, "MAX_LATE", examined)
    monkeypatch.setattr(reports, "MAX_COUNT", cap)
    now, two_days = timezone.now(), timedelta(days=2)
    for number, settled_at in enumerate([now - two_days, now - two_days, *[now - HOUR] * 3]):
        row = pending(Order.objects.create(), "nudge")
        due_at = now - two_days + number * timedelta(minutes=1)
        as_if(row, "fired", "due", due_at=due_at, run_at=due_at, settled_at=max(due_at, settled_at))
    skipped = pending(Order.objects.create(), "nudge")
    as_if(skipped, "skipped", "late", policy="testapp.order.remind_before", run_at=now - two_days)
    found = of("testapp.order.nudge")
    assert (str(found.fired), str(found.skipped)) == (fired, "1")
    assert found.lag_p50 is not None and found.lag_p50 > 46 * 3600
    assert of("testapp.order.remind").lag_p50 is None


def test_rows_whose_policy_nobody_declares_are_shown(order: Order) -> None:
    row = pending(order)
    Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.forgotten")
    found = of("testapp.order.forgotten")
    assert (found.state, found.pending.value) == (None, 1)
    for state, cause, counted in (("firing", "", "firing"), ("dead", "retries", "dead"), ("fired", "due", "fired")):
        as_if(row, state, cause, run_at=timezone.now())
        assert getattr(of("testapp.order.forgotten"), counted).value == 1, "a row that is shown elsewhere is counted"
    as_if(row, "dead", "retries")
    seen = status.snapshot()
    assert seen.dead.value == 1
    assert [each.state for each in seen.policies if each.label == "testapp.order.forgotten"] == [None]
    as_if(row, "cancelled", "hand")
    assert "testapp.order.forgotten" not in {each.label for each in status.policy_statuses()}
    assert search.labels_in(Timeout.objects.using("default")) == ["testapp.order.forgotten"]


def test_counts_go_no_further_than_they_promise(order: Order) -> None:
    for _ in range(5):
        pending(Order.objects.create())
    rows = Timeout.objects.using("default")
    assert search.count(rows, 5) == (5, False)
    assert str(search.count(rows, 4)) == "4+"
    assert search.count(rows, 4) + search.count(rows, 9) == (9, True)
    many = {number: rows.filter(pk__gt=number) for number in range(2 * search.COUNTS_PER_STATEMENT + 1)}
    assert len(search.count_each(many, "default", 3)) == len(many)


def test_the_whole_is_the_sum_and_leaves_out_what_is_paused_where_lateness_is_meant() -> None:
    now = timezone.now()
    as_if(pending(Order.objects.create()), "pending", run_at=now - 5 * HOUR)
    as_if(pending(Order.objects.create(), "linger"), "pending", run_at=now - HOUR)
    pause("testapp.order.remind", by=BY)
    seen = status.snapshot()
    assert (seen.pending.value, seen.overdue.value) == (2, 2)
    assert HOUR <= timedelta(seconds=seen.oldest_overdue_seconds) < 2 * HOUR
    assert [each.label for each in seen.policies if each.is_stopped] == ["testapp.order.remind"]


def test_a_snapshot_asks_as_much_of_a_full_ledger_as_of_an_empty_one() -> None:

    for label in ("remind", "linger"):
        pending(Order.objects.create(), label)
    status.snapshot()
    with CaptureQueriesContext(connection) as few:
        status.snapshot()
    for _ in range(30):
        pending(Order.objects.create())
    with CaptureQueriesContext(connection) as many:
        status.snapshot()
    assert len(many) == len(few)


def test_without_redis_that_is_said(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert not status.snapshot().redis.is_configured


def test_a_redis_that_is_away_is_said_and_nothing_is_raised(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://:secret@127.0.0.1:1/0"}
    seen = status.snapshot().redis
    assert (seen.is_configured, seen.is_reachable, seen.is_in_step) == (True, False, False)
    assert seen.error
    assert "secret" not in seen.error


def test_redis_is_in_step_until_it_has_lost_what_is_due_soon(redis_client: redis.Redis) -> None:
    rows = [pending(Order.objects.create(), seconds=1) for _ in range(3)]
    pending(Order.objects.create(), minutes=4)
    seen = status.snapshot().redis
    assert (seen.is_in_step, seen.compared, seen.missing) == (True, 3, 0)
    assert [(queue.name, queue.entries) for queue in seen.queues if queue.entries] == [("default", 4)]
    engine = get_engine("default")
    assert engine is not None
    remove_ids(engine.queue("default", 0), [row.pk for row in rows[:2]])
    assert status.snapshot().redis.missing == 2
    pause("testapp.order.remind", by=BY)
    assert status.snapshot().redis.compared == 0


@pytest.mark.usefixtures("redis_client")
def test_due_timeouts_that_wait_for_a_rate_are_not_missing_in_redis(declare: Any) -> None:
    declare(Order, name="paced", limits=Limits(rate=Rate(1, per=timedelta(hours=1))))
    for _ in range(3):
        pending(Order.objects.create(), "paced", seconds=0)
    running = RunningWorker()
    try:
        wait_until(lambda: Timeout.objects.pending().count() == 2)
        seen = status.snapshot().redis
    finally:
        running.stop()
    # Workers claim them from the ledger, and remove their entries some time.
    assert (seen.is_in_step, seen.compared) == (True, 0)


@pytest.mark.parametrize("source", ["redis", "ledger"])
def test_a_worker_is_seen_while_it_lives(source: str, request: pytest.FixtureRequest, settings: Settings) -> None:
    if source == "redis":
        request.getfixturevalue("redis_client")
    else:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    WorkerSeen.objects.create(
        id="killed long ago", host="x", pid=1, concurrency=1, version="0", uses_redis=False,
        started_at=timezone.now() - 3 * HOUR, seen_at=timezone.now() - 2 * HOUR, passed_at=timezone.now() - 2 * HOUR,
    )  # fmt: skip
    assert status.workers_alive("default") == []
    running = RunningWorker(concurrency=3, queues=["default", "mail"])
    try:
        wait_until(lambda: status.workers_alive("default"))
        (seen,) = status.workers_alive("default")
        assert (seen.queues, seen.concurrency, seen.uses_redis) == (("default", "mail"), 3, source == "redis")
        wait_until(lambda: not WorkerSeen.objects.filter(pk="killed long ago").exists())
    finally:
        running.stop()
    wait_until(lambda: not WorkerSeen.objects.exists())
    forget_engine()


def test_a_burst_is_no_worker_that_anybody_waits_for() -> None:
    due_orders("remind")
    controls.stop_cache.forget()
    Worker(burst=True, concurrency=1).run()
    assert not WorkerSeen.objects.exists()
