"""One timeout, one transaction: lock, check, compare-and-set, handler, commit."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock
from django_delayq.firing import Work, plan, run
from django_delayq.firing.log_lines import UNKNOWN_PAUSE
from django_delayq.firing.running import run_each
from django_delayq.ledger.locking import begin_write
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.integration.firing.conftest import due, fire, make_due, state
from tests.testapp.models import Effect, ExpressOrder, Order, OrderProxy, Parcel, Voucher

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]


def test_a_due_timeout_fires_and_its_work_is_committed_with_the_mark(order: Order) -> None:
    row = due(order, "cancel_unpaid")
    report = fire(row)
    assert (report.done, report.fired, report.again) == ((row.pk,), (row.pk,), {})
    assert state(row) == ("fired", "due")
    assert (row.attempts, row.settled_at is not None, row.slot_taken) == (1, True, None)
    order.refresh_from_db()
    assert order.status == "cancelled"
    lateness = row.lateness()
    assert lateness is not None
    assert lateness >= 0


def test_what_is_delivered_twice_fires_once(order: Order) -> None:
    row = due(order)
    [work], _ = plan({row.pk: 1}, "default")
    assert run(work, "default").fired == (row.pk,)
    again = run(work, "default")
    assert (again.fired, again.done) == ((), (row.pk,))
    assert fire(row).done == (row.pk,)
    assert Effect.objects.count() == 1


def test_a_hint_that_came_early_is_put_back_until_the_row_is_due(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=5)
    assert fire(row).again == {row.pk: row.run_at}
    forged = Work(row.policy, (row.pk,), (row.object_id,))
    assert run(forged, "default").again == {row.pk: row.run_at}
    assert state(row) == ("pending", "")
    assert not Effect.objects.exists()


def test_a_row_that_was_moved_after_the_plan_does_not_fire(order: Order) -> None:
    row = due(order)
    [work], _ = plan({row.pk: 1}, "default")
    moved = dq.reschedule_timeout(order, "remind", minutes=5)
    assert moved is not None
    assert run(work, "default").again == {row.pk: moved.run_at}
    assert not Effect.objects.exists()


def test_a_row_that_was_cancelled_after_the_plan_does_not_fire(order: Order) -> None:
    row = due(order)
    [work], _ = plan({row.pk: 1}, "default")
    assert dq.cancel_timeout(order, "remind")
    assert run(work, "default").done == (row.pk,)
    assert state(row) == ("cancelled", "hand")
    assert not Effect.objects.exists()


def test_a_workers_clock_that_is_ahead_fires_nothing_early(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no clock but the worker's")
    row = dq.schedule_timeout(order, "remind", minutes=5)
    real = timezone.now
    monkeypatch.setattr(timezone, "now", lambda: real() + timedelta(minutes=10))
    assert run(Work(row.policy, (row.pk,), (row.object_id,)), "default").again == {row.pk: row.run_at}
    assert not Effect.objects.exists()


@pytest.mark.parametrize("hours", [1, 7, 9])
def test_a_database_server_in_another_time_zone_fires_nothing_early(order: Order, hours: int) -> None:
    row = dq.schedule_timeout(order, "remind", hours=hours)
    assert fire(row).again == {row.pk: row.run_at}
    assert run(Work(row.policy, (row.pk,), (row.object_id,)), "default").again == {row.pk: row.run_at}
    assert state(row) == ("pending", "")


def test_the_set_clock_decides_about_firing_too(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=5)
    with clock.set_to(row.run_at - timedelta(microseconds=1)):
        assert not fire(row).fired
    with clock.set_to(row.run_at):
        assert fire(row).fired
    row.refresh_from_db()
    assert row.settled_at == row.run_at


def test_an_object_that_no_longer_matches_is_skipped(order: Order) -> None:
    row = due(order, "cancel_unpaid")
    Order.objects.update(status="paid")
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "condition")
    assert row.attempts == 0
    assert Order.objects.get().status == "paid"


def test_an_object_that_is_gone_is_skipped(order: Order) -> None:
    row = due(order)
    with connection.cursor() as cursor:  # behind Django's back, so that nothing cancels it
        cursor.execute("DELETE FROM testapp_order WHERE id = %s", [order.pk])
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "gone")


@pytest.mark.parametrize(
    "object_id", ["", "seven", "None", "1.5", "9" * 19, "9" * 40, "-" + "9" * 40, "0x1", "é", "-1"]
)
def test_an_object_id_that_no_row_can_have_is_skipped_as_gone(order: Order, object_id: str) -> None:
    row = due(order)
    Timeout.objects.update(object_id=object_id)
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "gone")


@pytest.mark.parametrize("object_id", ["", "no-uuid", "1", "g" * 32, "0d6a5f3c-9f5b-4c0e-8a55-2f1f6a7b8c9d"])
def test_a_uuid_that_is_none_or_nobodys_is_skipped_as_gone(object_id: str) -> None:
    row = due(Parcel.objects.create(), "chase")
    Timeout.objects.update(object_id=object_id)
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "gone")


@pytest.mark.parametrize("ids", [{0: 1}, {-5: 1}, {2**63: 1}, {10**40: 3}, {123456789: 1}])
def test_ids_without_a_row_are_done(ids: dict[int, int]) -> None:
    works, report = plan(ids, "default")
    assert (works, report.done) == ([], tuple(ids))


def test_a_uuid_key_leads_to_its_object() -> None:
    parcel = Parcel.objects.create()
    assert fire(due(parcel, "chase")).fired
    parcel.refresh_from_db()
    assert parcel.status == "chased"


def test_a_text_key_leads_to_its_object() -> None:
    voucher = Voucher.objects.create(code="Spring 10%")
    assert fire(due(voucher, "expire")).fired
    voucher.refresh_from_db()
    assert voucher.status == "expired"


def test_a_key_that_the_database_spells_otherwise_leads_to_its_object() -> None:
    voucher = Voucher.objects.create(code="SPRING")
    row = due(voucher, "expire")
    Timeout.objects.update(object_id="spring")
    fire(row)
    voucher.refresh_from_db()
    same = connection.vendor == "mysql"  # compares without regard to case
    assert (state(row), voucher.status) == ((("fired", "due"), "expired") if same else (("skipped", "gone"), "open"))


def test_a_policy_of_a_proxy_gets_the_proxy(order: Order, declare: Declare) -> None:
    seen: list[Any] = []
    policy = declare(OrderProxy, lambda obj, timeout: seen.append(obj), name="of_proxy")
    assert fire(due(order, policy)).fired or fire(due(OrderProxy.objects.get(), policy)).fired
    assert [type(obj) for obj in seen] == [OrderProxy]


def test_a_policy_of_a_child_gets_the_child_with_both_tables_locked(declare: Declare) -> None:
    seen: list[Any] = []
    policy = declare(ExpressOrder, lambda obj, timeout: seen.append(obj), name="of_child", when=Q(courier="fast"))
    express = ExpressOrder.objects.create(courier="fast")
    assert fire(due(express, policy)).fired
    assert [(type(obj), obj.courier, obj.status) for obj in seen] == [(ExpressOrder, "fast", "unpaid")]


def test_a_policy_of_a_parent_gets_the_parent_of_a_child(declare: Declare) -> None:
    seen: list[Any] = []
    declare(Order, lambda obj, timeout: seen.append(type(obj)), name="of_parent")
    assert fire(due(ExpressOrder.objects.create(), "of_parent")).fired
    assert seen == [Order]


def test_the_handler_gets_a_true_timeout_and_its_object(order: Order, declare: Declare) -> None:
    seen: dict[str, Any] = {}

    def look(obj: Order, timeout: Timeout) -> None:
        names = ("state", "attempts", "payload", "idempotency_key", "cause", "due_at", "key")
        seen.update({name: getattr(timeout, name) for name in names})
        seen["in the ledger"] = Timeout.objects.values_list("state", "attempts").get(pk=timeout.pk)
        seen["same object"] = timeout.content_object is obj
        seen["history"] = timeout.history

    row = due(order, declare(Order, look, name="look"), payload={"a": 1}, key="k")
    fire(row)
    assert seen == {
        "state": "fired",
        "attempts": 1,
        "payload": {"a": 1},
        "idempotency_key": row.idempotency_key,
        "cause": "due",
        "due_at": row.due_at,
        "key": "k",
        "in the ledger": ("fired", 1),
        "same object": True,
        "history": [],
    }


def test_the_object_is_fresh_and_not_the_one_that_was_planned(order: Order, declare: Declare) -> None:
    notes: list[str | None] = []
    row = due(order, declare(Order, lambda obj, timeout: notes.append(obj.note), name="look"))
    [work], _ = plan({row.pk: 1}, "default")
    Order.objects.update(note="new")
    run(work, "default")
    assert notes == ["new"]


def test_a_former_name_of_a_policy_still_fires(order: Order, declare: Declare) -> None:
    old = declare(Order, name="old_name")
    row = due(order, old)
    registry.remove(old)
    ran: list[int] = []
    declare(Order, lambda obj, timeout: ran.append(timeout.pk), name="new_name", aliases=["old_name"])
    assert fire(row).fired == (row.pk,)
    assert ran == [row.pk]


def test_a_policy_that_is_not_declared_waits_and_fires_when_it_is_back(order: Order, declare: Declare) -> None:
    policy = declare(Order, lambda obj, timeout: None, name=f"gone_{uuid.uuid4().hex}")
    row, other = due(order, policy), due(Order.objects.create(), policy)
    registry.remove(policy)
    for _ in range(2):
        again = fire(row, other).again
        assert set(again) == {row.pk, other.pk}
        assert all(timedelta(0) < at - timezone.now() <= UNKNOWN_PAUSE for at in again.values())
    assert run(Work(policy.label, (row.pk,), (row.object_id,)), "default").again.keys() == {row.pk}
    assert state(row) == ("pending", "")
    dq.register_policy(policy)
    assert fire(row).fired == (row.pk,)


def test_a_firing_takes_one_or_three_statements_before_its_handler_and_leaves_the_history_alone(order: Order) -> None:
    row = due(order, "cancel_unpaid")
    [work], _ = plan({row.pk: 1}, "default")
    Timeout.objects.filter(pk=row.pk).update(history=[{"what": "something", "at": "2026-01-01T00:00:00+00:00"}])
    with CaptureQueriesContext(connection) as queries:
        run(work, "default")
    without_wait = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "  # MariaDB
    words = [query["sql"].removeprefix(without_wait) for query in queries.captured_queries]
    ours = [sql for sql in words if "testapp_effect" not in sql and not sql.startswith(("BEGIN", "COMMIT", "SET "))]
    before_handler = ours[: next(n for n, sql in enumerate(ours) if "'fired'" in sql) + 1]
    kinds = [(sql.split()[0], "testapp_order" in sql) for sql in before_handler if "id = -1" not in sql]
    at_once = can_mark_at_once(dq.get_policy(row.policy), "default")
    assert kinds == [("WITH", True)] if at_once else [("SELECT", True), ("SELECT", False), ("UPDATE", False)]
    assert not any('"history"' in sql or "`history`" in sql for sql in before_handler)
    row.refresh_from_db()
    assert len(row.history) == 1


def test_a_condition_without_a_restriction_costs_no_statement(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, name="always", when=Q()))
    with CaptureQueriesContext(connection) as queries:
        fire(row)
    found = [q["sql"] for q in queries.captured_queries]
    reads = [sql for sql in found if sql.startswith(("SELECT", "WITH")) and "testapp_order" in sql]
    assert len(reads) == 1


def test_on_sqlite_the_transaction_writes_before_it_reads(order: Order) -> None:
    if connection.vendor != "sqlite":
        pytest.skip("about SQLite")
    row = due(order)
    with CaptureQueriesContext(connection) as queries:
        fire(row)
    at_once = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "  # MariaDB
    words = [query["sql"].removeprefix(at_once) for query in queries.captured_queries]
    begin = next(number for number, sql in enumerate(words) if sql.startswith("BEGIN"))
    assert words[begin].startswith("BEGIN IMMEDIATE") or words[begin + 1].startswith("UPDATE")


def test_on_sqlite_a_transaction_that_begins_as_a_reader_writes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    if connection.vendor != "sqlite":
        pytest.skip("about SQLite")
    for mode, statements in (("IMMEDIATE", 0), ("DEFERRED", 1)):
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "transaction_mode", mode)
        with transaction.atomic(), CaptureQueriesContext(connection) as queries:
            begin_write("default")
        assert len([query for query in queries if query["sql"].startswith("UPDATE")]) == statements


def test_a_row_whose_object_changed_hands_after_the_plan_is_planned_anew(order: Order) -> None:
    row = due(order)
    other = Order.objects.create()
    wrong = Work(row.policy, (row.pk,), (str(other.pk),))
    report = run(wrong, "default")
    assert (report.fired, list(report.again)) == ((), [row.pk])
    make_due(row)
    assert fire(row).fired


@pytest.mark.parametrize(
    ("end", "count"), [("none", 4), ("one that fails", 2), ("one that moves", 2), ("a receiver", 1)]
)
def test_works_that_follow_each_other_are_reported_together_while_all_are_settled(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture, end: str, count: int
) -> None:
    def act(obj: Order, timeout: Timeout) -> Any:
        if obj == orders[1] and end == "one that fails":
            raise ValueError
        return dq.Snooze(hours=1) if obj == orders[1] and end == "one that moves" else None

    caplog.set_level(logging.INFO, "django_delayq.firing")
    policy, taken, logged = declare(Order, act, name="in_turn"), list[Work](), list[int]()
    rows = [due(order, policy) for order in orders[:4]]
    works, _ = plan({row.pk: 1 for row in rows}, "default")

    def each() -> Iterator[Work]:
        for work in works:
            logged.append(sum(getattr(record, "event", "") == "timeout_fired" for record in caplog.records))
            taken.append(work)
            yield work

    def hear(**_: Any) -> None:
        """Listen."""

    if end == "a receiver":
        dq.timeout_fired.connect(hear)
    try:
        report = run_each(each(), "default")
    finally:
        dq.timeout_fired.disconnect(hear)
    assert len(taken) == count
    assert sorted([*report.done, *report.again]) == sorted(work.ids[0] for work in taken)
    assert logged == [0] * count, "one after the other at the end"
    assert [state(row)[0] for row in rows[count:]] == ["pending"] * (4 - count)
