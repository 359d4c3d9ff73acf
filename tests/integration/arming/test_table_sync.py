"""The regular sync: it reads without locks, decides again under the lock, and continues where it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import F, Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming import scan, sync
from django_delayq.arming.sync import Synced, TableSync, sync_policy, sync_timeouts
from django_delayq.models import PolicySync, Timeout
from django_delayq.monitoring.snapshot import policy_statuses
from tests.e2e.races.sessions import needs_row_locks
from tests.integration.firing.conftest import in_another_thread
from tests.support.seen import sql_of
from tests.support.waiting import wait_until
from tests.testapp.models import ExpressOrder, Item, Order, Task

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
EXEMPT = "exempt"
TABLES = (Order._meta.db_table, Timeout._meta.db_table)
SLOW: dict[str, Any] = {"name": "slow", "since": "created_at", "after": HOUR, "when": Q(status="slow")}
CALLED: dict[str, Any] = {
    "since": {"since": lambda order: order.created_at},
    "after": {"after": lambda order: None if order.note == EXEMPT else HOUR},
}
CALLED["both"] = CALLED["since"] | CALLED["after"]


@pytest.fixture(params=CALLED)
def policy(request: pytest.FixtureRequest, declare: Any) -> dq.TimeoutPolicy[Any]:
    """A policy with a callable, which the database cannot evaluate."""
    return declare(Order, **SLOW | CALLED[request.param])  # type: ignore[no-any-return]


@pytest.fixture
def plain(declare: Any) -> dq.TimeoutPolicy[Any]:
    """A policy that the database evaluates."""
    return declare(Order, **SLOW)  # type: ignore[no-any-return]


@pytest.fixture
def long(declare: Any, small: None) -> dq.TimeoutPolicy[Any]:
    """A policy whose passes take many slices of two objects each."""
    return declare(Order, **SLOW | CALLED["since"])  # type: ignore[no-any-return]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two objects, and slices of one page."""
    monkeypatch.setattr(scan, "CHUNK", 2)
    monkeypatch.setattr(sync, "SLICE_SECONDS", 1e-9)


def begun(policy: dq.TimeoutPolicy[Any], count: int) -> TableSync:
    """Return the sync of a worker that has armed the first two of so many orders."""
    slow_orders(count)
    tables = TableSync("default")
    while not pending(policy):
        tables.run()
    return tables


def minutes_ago(minutes: float) -> datetime:
    return timezone.now() - timedelta(minutes=minutes)


def slow_orders(count: int, **values: Any) -> list[Order]:
    Order.objects.bulk_create([Order(status="slow", **{"created_at": timezone.now(), **values}) for _ in range(count)])
    return list(Order.objects.order_by("-pk")[:count])


def pending(policy: dq.TimeoutPolicy[Any]) -> int:
    return Timeout.objects.pending().filter(policy=policy.label).count()


def test_what_saves_did_not_see_is_armed_moved_and_cancelled(policy: dq.TimeoutPolicy[Any]) -> None:
    orders = slow_orders(5)
    assert sync_policy(policy, "default") == Synced(armed=5)
    assert sync_policy(policy, "default") == Synced()
    later = timezone.now() + timedelta(minutes=5)
    Order.objects.filter(pk=orders[0].pk).update(created_at=later)
    Order.objects.filter(pk=orders[1].pk).update(status="paid")
    Timeout.objects.filter(object_id=str(orders[2].pk)).update(
        state="fired", cause="due", slot_taken=None, settled_at=later
    )
    assert sync_policy(policy, "default") == Synced(moved=1, cancelled=1), "a fired round stays closed"
    assert Timeout.objects.pending().get(object_id=str(orders[0].pk)).due_at == later + HOUR
    assert sync_policy(policy, "default") == Synced()


@pytest.mark.parametrize("values", [{"note": EXEMPT}, {}, {"created_at": timezone.now() - 300 * DAY}])
@pytest.mark.parametrize("policy", ["both"], indirect=True)
def test_rows_that_need_no_change_cost_a_few_statements_each_page_and_no_lock(
    policy: dq.TimeoutPolicy[Any], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exempt objects, those that have fired, and those whose rounds are too old to be armed."""
    monkeypatch.setattr(scan, "CHUNK", 50)
    counts = []
    for _ in range(2):
        slow_orders(50, **values)
        sync_policy(policy, "default")
        Timeout.objects.pending().update(state="fired", cause="due", slot_taken=None, settled_at=timezone.now())
        found = list[Synced]()
        sent = sql_of(lambda: found.append(sync_policy(policy, "default")))  # noqa: B023 - called at once
        assert (found[0].armed, found[0].moved, found[0].cancelled) == (0, 0, 0)
        words = " ".join(sent).upper()
        assert not any(word in words for word in ("FOR UPDATE", "FOR NO KEY UPDATE", "UPDATE ", "INSERT"))
        counts.append(len(sent))
    assert counts[1] - counts[0] <= 3
    assert counts[1] <= 12


def plan_of(sql: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {'QUERY PLAN ' * (connection.vendor == 'sqlite')}{sql}")
        return "\n".join(" ".join(map(str, row)) for row in cursor.fetchall())


def test_without_statistics_the_database_looks_up_each_object_too(plain: dq.TimeoutPolicy[Any]) -> None:
    """After a restored dump PostgreSQL joined 80,000 orders with all rows of their policy: minutes for each search."""
    sync_timeouts(slow_orders(2000))
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("DELETE FROM pg_statistic WHERE starelid IN (%s::regclass, %s::regclass)", TABLES)
    sent = sql_of(lambda: sync_policy(plain, "default"))
    unarmed, mismatched = (plan_of(sql) for sql in sent if all(table in sql for table in TABLES))
    assert "delayq_object" in unarmed
    assert "Join" not in unarmed + mismatched


def test_a_change_between_reading_and_locking_is_seen(declare: Any) -> None:
    paid, moved, gone, kept = slow_orders(4)
    later = timezone.now() + timedelta(minutes=10)

    def change() -> None:
        Order.objects.filter(pk=paid.pk).update(status="paid")
        Order.objects.filter(pk=moved.pk).update(created_at=later)
        Order.objects.filter(pk=gone.pk)._raw_delete("default")

    changes: Iterator[Callable[[], object]] = iter([change])

    def after(order: Order) -> timedelta:
        if not connection.in_atomic_block and (work := next(changes, None)):
            in_another_thread(work)
        return HOUR

    policy = declare(Order, **SLOW | {"after": after})
    assert sync_policy(policy, "default") == Synced(armed=2)
    found = dict(Timeout.objects.filter(policy=policy.label).values_list("object_id", "due_at"))
    kept.refresh_from_db()
    assert kept.created_at is not None
    assert found == {str(moved.pk): later + HOUR, str(kept.pk): kept.created_at + HOUR}


def test_a_long_pass_goes_on_after_a_pause_and_another_worker_continues_it(long: dq.TimeoutPolicy[Any]) -> None:
    slow_orders(7)
    first, second = TableSync("default"), TableSync("default")

    def place() -> PolicySync:
        return PolicySync.objects.get(policy=long.label)

    while not pending(long):
        pause = first.run()
        assert 0 < pause < 60
    assert (pending(long), place().checked, place().is_running) == (2, 2, True)
    (shown,) = (status.sync for status in policy_statuses("default") if status.label == long.label)
    assert shown is not None and (shown.is_running, shown.checked) == (True, 2)
    assert 0 < second.run() <= 30.0, "the first one has the claim"
    assert pending(long) == 2
    while pending(long) == 2:  # policies that have not begun come first
        first.run()
    assert (pending(long), place().checked) == (4, 4)
    PolicySync.objects.update(claimed_until=timezone.now() - timedelta(seconds=1))  # the first one is gone
    for _ in range(8):
        second.run()
    assert (pending(long), place().checked, place().total, place().is_running) == (7, 7, 7, False)
    assert (place().claimed_until or timezone.now()) <= timezone.now(), "the claim has ended"
    assert first.run() == 60.0, "nothing is due before the next interval"


def tasks_with_items(count: int) -> list[Task]:
    """Tasks with two open items each: a condition on the items returns each task twice."""
    tasks = [Task.objects.create(begun_at=timezone.now()) for _ in range(count)]
    Item.objects.bulk_create([Item(task=task) for task in tasks for _ in range(2)])
    return tasks


@pytest.mark.usefixtures("small")
def test_a_condition_on_many_rows_of_one_object_does_not_end_the_pass(declare: Any) -> None:
    """A page of rows has fewer objects than rows, and one object may fill several pages."""
    policy = declare(Task, name="slow", since=lambda task: task.begun_at, after=HOUR, when=Q(items__is_open=True))
    tasks = tasks_with_items(5)
    Item.objects.bulk_create([Item(task=tasks[1]) for _ in range(5)])
    assert sync_policy(policy, "default") == Synced(armed=5)


def test_the_pause_keeps_reading_at_five_percent(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(Order, **SLOW | CALLED["since"])
    slow_orders(10)
    calls = itertools.count()
    monkeypatch.setattr("django_delayq.arming.sync.time", SimpleNamespace(monotonic=lambda: next(calls) * 0.2))
    pause = TableSync("default").run()
    spent = next(calls) / 2 * 0.2  # the clock is read before and after each step
    assert pause == pytest.approx(19 * spent)


def test_a_claim_that_could_not_be_renewed_is_still_the_one_of_this_worker(long: dq.TimeoutPolicy[Any]) -> None:
    """Otherwise no worker would continue the pass until the claim ends, and this one not for an interval."""
    tables = begun(long, 7)

    def fail(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and PolicySync._meta.db_table in sql:
            raise OperationalError("the server is gone")
        return execute(sql, *rest)

    with connection.execute_wrapper(fail), pytest.raises(OperationalError):
        tables.run()
    pauses = [tables.run() for _ in range(8)]
    assert (pending(long), pauses[0] < 20.0) == (7, True)  # half an interval, if it took the claim for another's


@pytest.mark.usefixtures("small")
def test_of_two_workers_that_see_the_sync_unclaimed_one_gets_it() -> None:
    TableSync("default").run(at_once=True)  # the rows exist
    PolicySync.objects.update(began_at=minutes_ago(60), finished_at=minutes_ago(60))
    first, second, pauses = TableSync("default"), TableSync("default"), list[float]()

    def claim_first(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and PolicySync._meta.db_table in sql and not pauses:
            pauses.append(in_another_thread(second.run))
        return execute(sql, *rest)

    with connection.execute_wrapper(claim_first):
        assert first.run() == 30.0
    (pause,) = pauses
    assert pause < 30.0, "the second one has synced a slice and continues"


@pytest.mark.parametrize(
    ("finished", "claimed", "due", "armed"),
    [
        *((1, None, 6, True), (1, None, 9, False)),  # the pass before began 5 minutes before it finished
        *((180, None, 6, True), (180, None, 20, False)),  # no worker has run for hours: old rounds are left alone
        *((180, 1, 170, True), (180, 1, 190, False)),  # workers have run, but were killed in the middle of each pass
    ],
)
def test_what_became_due_since_the_last_complete_pass_is_armed_if_workers_have_run(
    plain: dq.TimeoutPolicy[Any], finished: float, claimed: float | None, due: float, armed: bool
) -> None:
    times = {"began_at": minutes_ago(finished + 5), "finished_at": minutes_ago(finished)}
    PolicySync.objects.create(
        policy=plain.label, **times, claimed_until=None if claimed is None else minutes_ago(claimed)
    )
    slow_orders(1, created_at=minutes_ago(60 + due))
    TableSync("default").run(at_once=True)
    assert pending(plain) == armed


def test_no_round_is_armed_whose_row_may_have_been_pruned(plain: dq.TimeoutPolicy[Any], settings: Any) -> None:
    """A project that does not need the sync lets it run once a month. Reminders were sent a second time then."""
    settings.DELAYQ = {**settings.DELAYQ, "SYNC_INTERVAL": 30 * DAY, "RETENTION": 30 * DAY}
    for days in (31, 14):
        slow_orders(1, created_at=timezone.now() - days * DAY)
    TableSync("default").run(at_once=True)
    assert pending(plain) == 1
    assert sync_policy(plain, "default").armed == 0


def test_a_policy_whose_turn_has_come_does_not_wait_for_a_long_pass(long: dq.TimeoutPolicy[Any], declare: Any) -> None:
    quick = declare(Order, **SLOW | {"name": "quick", "when": Q(status="quick")})
    tables = begun(long, 40)
    Order.objects.bulk_create([Order(status="quick", created_at=timezone.now())])
    PolicySync.objects.filter(policy=quick.label).update(began_at=minutes_ago(2), finished_at=minutes_ago(2))
    done = pending(long)
    for _ in range(6):  # the policies of the test's application have their turn, too
        tables.run()
        if pending(quick):
            break
    assert (pending(quick), pending(long)) == (1, done)


# The clock of the database was an hour ahead, and is corrected: what it has left does not stop the sync.


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_next_sync_does_not_wait_until_the_clock_shows_the_same_time_again(
    plain: dq.TimeoutPolicy[Any], is_complete: bool
) -> None:
    """Rounds that became due within this hour were too old afterwards, and were never armed."""
    TableSync("default").run(at_once=True)
    ahead = timezone.now() + HOUR
    times = {"before_at": ahead, "began_at": ahead, "claimed_until": ahead}
    PolicySync.objects.update(**times, finished_at=ahead if is_complete else None)
    for at in (timezone.now(), timezone.now() - HOUR - timedelta(seconds=5)):
        slow_orders(1, created_at=at)
    tables = TableSync("default")
    # A slice may end before this policy's turn, on a slow machine.
    wait_until(lambda: tables.run() and pending(plain) == 2, "its rounds are armed", seconds=20)


# The sync does not wait for objects that other transactions have locked; a backfill does.


@pytest.fixture(params=[Order, ExpressOrder])
def locked(request: pytest.FixtureRequest, declare: Any) -> tuple[dq.TimeoutPolicy[Any], Any, Any]:
    """A policy, and two orders without timeouts: one to lock, and a free one."""
    policy = declare(request.param, **SLOW)
    first, second = (request.param.objects.create(status="new", created_at=timezone.now()) for _ in range(2))
    request.param.objects.update(status="slow")
    return policy, first, second


@needs_row_locks
def test_an_object_that_stays_locked_is_armed_afterwards_although_its_deadline_has_passed(
    locked: tuple[dq.TimeoutPolicy[Any], Any, Any],
) -> None:
    """Sync and pruning of all workers waited for it, however long that transaction was forgotten."""
    policy, held, free = locked
    tables = TableSync("default")

    def minutes_later(minutes: int) -> None:
        by = timedelta(minutes=minutes)
        times = {name: F(name) - by for name in ("before_at", "began_at", "finished_at")}
        PolicySync.objects.filter(policy=policy.label).update(**times, claimed_until=None)

    def sync_twice() -> None:
        tables.run(at_once=True)
        minutes_later(8)
        tables.run(at_once=True)

    Order.objects.filter(pk=held.pk).update(created_at=minutes_ago(66))
    rows = Timeout.objects.pending().filter(policy=policy.label).order_by("id").values_list("object_id", flat=True)
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=held.pk)
        in_another_thread(sync_twice)
        assert list(rows.all()) == [str(free.pk)]
    minutes_later(2)
    tables.run(at_once=True)
    assert list(rows.all()) == [str(free.pk), str(held.pk)]
