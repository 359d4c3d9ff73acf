"""One timeout, one transaction: plan, lock, check, compare-and-set, handler, commit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.firing import Work, plan, run
from django_delayq.ledger import marking
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.locking import begin_write
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, make_due, state, work_of
from tests.integration.firing.handlers import Declare, Patch
from tests.integration.firing.rows import FIRED, UNTRIED, tried
from tests.testapp.models import Effect, Order, Parcel

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def forged(row: Timeout) -> Work:
    """Return a work of `row` that no plan has made."""
    return Work(row.policy, (row.pk,), (row.object_id,))


def plan_of(*rows: Timeout, ahead: timedelta = timedelta(0)) -> Any:
    return plan({row.pk: 1 for row in rows}, "default", ahead)


def test_one_query_for_everything_and_work_by_policy(orders: list[Order], declare: Declare) -> None:
    policies: list[Any] = [declare(Order, name="batch", batch=2), declare(Order, name="together", together=3)]
    single = declare(Order, name="outside", atomic=False)
    rows = [due(order, policy) for policy in ("remind", *policies, single) for order in orders]
    rows += [due(Parcel.objects.create(), "chase")]
    later, settled = dq.schedule_timeout(orders[0], "cancel_unpaid", minutes=1), due(orders[1], "cancel_unpaid")
    dq.cancel_timeout(settled)
    unknown = [0, -5, 10**9, 2**63, 10**40]
    deliveries = {**dict.fromkeys([row.pk for row in [*rows, later, settled]], 1), **dict.fromkeys(unknown, 1)}
    deliveries[rows[0].pk] = 2
    with CaptureQueriesContext(connection) as queries:
        works, report = plan(deliveries, "default")
    # And once a second one for what operators have stopped.
    [asked] = [query["sql"] for query in queries if "policycontrol" not in query["sql"]]
    assert "history" not in asked
    assert sorted(report.done) == sorted([settled.pk, *unknown])
    assert (report.again, report.now is not None) == ({later.pk: later.run_at}, True)
    found: dict[str, list[tuple[int, bool]]] = {}
    for work in works:
        found.setdefault(work.policy.rpartition(".")[2], []).append((len(work.ids), work.suspect))
    assert found == {
        "remind": [(1, True), *[(1, False)] * 4],
        "together": [(3, False), (2, False)],
        "batch": [(2, False), (2, False), (1, False)],
        "outside": [(1, False)] * 5,
        "chase": [(1, False)],
    }
    assert sorted(timeout_id for work in works for timeout_id in work.ids) == [row.pk for row in rows]
    assert plan(dict.fromkeys(unknown, 1), "default")[0] == plan({}, "default")[0] == []


@pytest.mark.parametrize("option", ["together", "batch"])
def test_neither_two_queues_nor_one_object_twice_are_in_a_work(declare: Declare, option: Any) -> None:
    policy = declare(Order, name="shared", **{option: 20})
    first, second = Order.objects.create(), Order.objects.create()
    rows = [due(first, policy, key=key) for key in "abc"] + [due(second, policy)]
    Timeout.objects.filter(pk=rows[0].pk).update(queue="elsewhere")
    assert [(work.queue, len(work.ids)) for work in plan_of(*rows)[0]] == [
        ("elsewhere", 1),
        ("default", 2),
        ("default", 1),
    ]


def test_what_is_planned_ahead_shares_a_work_if_due_at_the_same_time(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, name="shared", together=20)
    at = timezone.now() + timedelta(seconds=30)
    rows = [
        dq.schedule_timeout(order, policy, at=at + timedelta(milliseconds=after))
        for after, order in zip((0, 1, 3, 9), orders, strict=False)
    ]
    now = due(orders[4], policy)
    assert [work.ids for work in plan_of(*rows, now)[0]] == [(now.pk,)]
    ids = [row.pk for row in rows]
    works, report = plan_of(*rows, now, ahead=timedelta(minutes=1))
    assert sorted(work.ids for work in works) == sorted([(now.pk,), (ids[0], ids[1]), (ids[2],), (ids[3],)])
    assert report.early == {row.pk: row.run_at for row in rows}


def test_a_due_timeout_fires_once_and_its_work_is_committed_with_the_mark(order: Order) -> None:
    row = due(order, "cancel_unpaid")
    work = work_of(row)
    report = run(work, "default")
    assert (report.done, report.fired, report.again) == ((row.pk,), (row.pk,), {})
    assert (tried(row), row.settled_at is not None, row.slot_taken) == ((FIRED, 1), True, None)
    assert (Order.objects.get().status, (row.lateness() or 0) >= 0) == ("cancelled", True)
    again = run(work, "default")  # delivered twice
    assert (again.fired, again.done) == ((), (row.pk,))
    assert fire(row).done == (row.pk,)
    assert Effect.objects.count() == 1


def test_what_is_early_or_was_moved_or_cancelled_after_the_plan_does_not_fire(orders: list[Order]) -> None:
    early, moved, cancelled = dq.schedule_timeout(orders[2], "remind", minutes=5), due(orders[0]), due(orders[1])
    works = [work_of(moved), work_of(cancelled)]
    until = dq.reschedule_timeout(orders[0], "remind", minutes=5)
    dq.cancel_timeout(orders[1], "remind")
    assert fire(early).again == run(forged(early), "default").again == {early.pk: early.run_at}
    assert until is not None
    assert run(works[0], "default").again == {moved.pk: until.run_at}
    assert run(works[1], "default").done == (cancelled.pk,)
    assert not Effect.objects.exists()


@pytest.mark.parametrize("count", [1, 3])
def test_without_its_mark_no_handler_runs(orders: list[Order], monkeypatch: Patch, count: int) -> None:
    """The UPDATE that compares has found fewer rows than were locked: on SQLite another process may have written."""
    rows = [due(order, "remind_many") for order in orders[:count]]  # a batch is marked by a statement of its own
    with monkeypatch.context() as patched:
        patched.setattr(marking, "mark_fired", lambda *_, **__: False)
        report = fire(*rows)
    assert set(report.again) == {row.pk for row in rows}
    assert {tried(row) for row in rows} == {UNTRIED}
    assert not Effect.objects.exists()
    fire(*rows)
    assert {state(row)[0] for row in rows} == {"fired"}


def test_a_stop_is_seen_with_the_row_at_the_latest(order: Order, monkeypatch: Patch) -> None:
    """The cache may omit a new stop for up to a second; the locking statement reads it."""
    row = due(order)
    work = work_of(row)
    with monkeypatch.context() as patched:
        patched.setattr(type(stop_cache), "forget", lambda self: None)
        operations.pause("testapp.order.remind", by="script:test")
        report = run(work, "default")
    stop_cache.forget()
    assert (set(report.again), tried(row)) == ({row.pk}, UNTRIED)
    assert not Effect.objects.exists()
    works, report = plan_of(row)
    assert (works, report.now is not None and report.again[row.pk] > report.now) == ([], True)


@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite")
@pytest.mark.parametrize(("mode", "count"), [("IMMEDIATE", 0), ("DEFERRED", 1)])
def test_on_sqlite_a_transaction_begins_as_a_writer(monkeypatch: Patch, mode: str, count: int) -> None:
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "transaction_mode", mode)
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        begin_write("default")
    assert sum(each["sql"].startswith("UPDATE") for each in queries) == count


IMPOSSIBLE_KEYS: dict[str, tuple[Any, list[str]]] = {
    "remind": (Order, ["", "seven", "1.5", "9" * 19, "-" + "9" * 40, "0x1", "é", "-1"]),
    "chase": (Parcel, ["", "no-uuid", "g" * 32, "0d6a5f3c-9f5b-4c0e-8a55-2f1f6a7b8c9d"]),
}


@pytest.mark.parametrize("policy", IMPOSSIBLE_KEYS)
def test_an_object_that_is_gone_or_whose_id_no_row_can_have_is_skipped(policy: str) -> None:
    model, keys = IMPOSSIBLE_KEYS[policy]
    rows = [due(model.objects.create(), policy) for _ in [*keys, "gone"]]
    for row, key in zip(rows, keys, strict=False):
        Timeout.objects.filter(pk=row.pk).update(object_id=key)
    model.objects.all()._raw_delete("default")  # behind Django's back, so that nothing cancels it
    assert sorted(fire(*rows).done) == [row.pk for row in rows]
    assert {state(row) for row in rows} == {("skipped", "gone")}


def test_a_row_whose_object_changed_hands_after_the_plan_is_planned_anew(order: Order) -> None:
    row = due(order)
    report = run(Work(row.policy, (row.pk,), (str(Order.objects.create().pk),)), "default")
    assert (report.fired, list(report.again)) == ((), [row.pk])
    make_due(row)
    assert fire(row).fired


# What the handler gets, and does to timeouts: its own row is settled by then, and its slot is free


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_handler_schedules_its_next_round_unless_it_fails(order: Order, declare: Declare, fails: bool) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        dq.schedule_timeout(obj, "rounds", minutes=5, payload={"round": (timeout.payload or {})["round"] + 1})
        if fails:
            raise ValueError

    row = due(order, declare(Order, handler, name="rounds", retry=dq.Retry([60])), payload={"round": 1})
    fire(row)
    found = list(Timeout.objects.order_by("id").values_list("state", "payload"))
    next_round = ("pending", {"round": 2})
    assert found == ([("pending", {"round": 1})] if fails else [("fired", {"round": 1}), next_round])
