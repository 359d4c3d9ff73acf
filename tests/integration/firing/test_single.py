"""One timeout, one transaction: lock, check, compare-and-set, handler, commit."""

from __future__ import annotations

import gc
import logging
import uuid
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.firing import Work, plan, run
from django_delayq.firing.judge import LostRace
from django_delayq.firing.log_lines import UNKNOWN_PAUSE
from django_delayq.firing.running import run_each
from django_delayq.ledger import marking
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.locking import begin_write
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.integration.firing.conftest import (
    FIRED,
    PENDING,
    UNTRIED,
    Declare,
    due,
    execute,
    fire,
    logged,
    make_due,
    receiving,
    state,
    tried,
    work_of,
)
from tests.testapp.models import Effect, ExpressOrder, Order, OrderProxy, Parcel

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
on_sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite")


def forged(row: Timeout) -> Work:
    """Return a work of `row` that no plan has made."""
    return Work(row.policy, (row.pk,), (row.object_id,))


def test_a_due_timeout_fires_and_its_work_is_committed_with_the_mark(order: Order) -> None:
    row = due(order, "cancel_unpaid")
    report = fire(row)
    assert (report.done, report.fired, report.again) == ((row.pk,), (row.pk,), {})
    assert (tried(row), row.settled_at is not None, row.slot_taken) == ((FIRED, 1), True, None)
    assert Order.objects.get().status == "cancelled"
    assert (row.lateness() or 0) >= 0


def test_what_is_delivered_twice_fires_once(order: Order) -> None:
    row = due(order)
    work = work_of(row)
    assert run(work, "default").fired == (row.pk,)
    again = run(work, "default")
    assert (again.fired, again.done) == ((), (row.pk,))
    assert fire(row).done == (row.pk,)
    assert Effect.objects.count() == 1


def test_a_hint_that_came_early_is_put_back_until_the_row_is_due(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=5)
    assert fire(row).again == run(forged(row), "default").again == {row.pk: row.run_at}
    assert (state(row), Effect.objects.count()) == (PENDING, 0)


def test_a_row_that_was_moved_or_cancelled_after_the_plan_does_not_fire(orders: list[Order]) -> None:
    moved, cancelled = due(orders[0]), due(orders[1])
    works = [work_of(moved), work_of(cancelled)]
    until = dq.reschedule_timeout(orders[0], "remind", minutes=5)
    dq.cancel_timeout(orders[1], "remind")
    assert until is not None
    assert run(works[0], "default").again == {moved.pk: until.run_at}
    assert run(works[1], "default").done == (cancelled.pk,)
    assert not Effect.objects.exists()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no clock but the worker's")
def test_a_workers_clock_that_is_ahead_fires_nothing_early(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    row, real = dq.schedule_timeout(order, "remind", minutes=5), timezone.now
    monkeypatch.setattr(timezone, "now", lambda: real() + timedelta(minutes=10))
    assert run(forged(row), "default").again == {row.pk: row.run_at}
    assert not Effect.objects.exists()


# The object


NO_NUMBERS = ["", "seven", "None", "1.5", "9" * 19, "9" * 40, "-" + "9" * 40, "0x1", "é", "-1"]
NO_UUIDS = ["", "no-uuid", "1", "g" * 32, "0d6a5f3c-9f5b-4c0e-8a55-2f1f6a7b8c9d"]


@pytest.mark.parametrize(
    ("model", "policy", "object_id"),
    [*((Order, "remind", key) for key in NO_NUMBERS), *((Parcel, "chase", key) for key in NO_UUIDS)],
)
def test_an_object_id_that_no_row_can_have_is_skipped_as_gone(model: Any, policy: str, object_id: str) -> None:
    row = due(model.objects.create(), policy)
    Timeout.objects.update(object_id=object_id)
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "gone")


def test_an_object_that_is_gone_is_skipped(order: Order) -> None:
    row = due(order)
    execute(f"DELETE FROM testapp_order WHERE id = {order.pk}")  # behind Django's back, so that nothing cancels it
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "gone")


def test_a_row_whose_object_changed_hands_after_the_plan_is_planned_anew(order: Order) -> None:
    row = due(order)
    report = run(Work(row.policy, (row.pk,), (str(Order.objects.create().pk),)), "default")
    assert (report.fired, list(report.again)) == ((), [row.pk])
    make_due(row)
    assert fire(row).fired


@pytest.mark.parametrize(("of", "given"), [(OrderProxy, Order), (ExpressOrder, ExpressOrder), (Order, ExpressOrder)])
def test_a_policy_of_a_proxy_a_child_or_a_parent_gets_objects_of_its_model(
    declare: Declare, of: Any, given: Any
) -> None:
    seen: list[type] = []
    declare(of, lambda obj, timeout: seen.append(type(obj)), name="of_kind", when=Q(status="unpaid"))
    assert fire(due(given.objects.create(), f"{of._meta.label_lower}.of_kind")).fired
    assert seen == [of]


def test_the_handler_gets_a_true_timeout_and_its_object(order: Order, declare: Declare) -> None:
    seen: dict[str, Any] = {}

    def look(obj: Order, timeout: Timeout) -> None:
        names = ("state", "attempts", "payload", "idempotency_key", "cause", "due_at", "key", "history")
        seen.update({name: getattr(timeout, name) for name in names})
        seen["in the ledger"] = Timeout.objects.values_list("state", "attempts").get(pk=timeout.pk)
        seen["same object"] = timeout.content_object is obj

    row = due(order, declare(Order, look, name="look"), payload={"a": 1}, key="k")
    fire(row)
    expected = {"state": "fired", "attempts": 1, "payload": {"a": 1}, "cause": "due", "key": "k", "history": []}
    of_row = {"idempotency_key": row.idempotency_key, "due_at": row.due_at}
    assert seen == {**expected, **of_row, "in the ledger": ("fired", 1), "same object": True}


# The policy


def test_a_former_name_of_a_policy_still_fires(order: Order, declare: Declare) -> None:
    old = declare(Order, name="old_name")
    row = due(order, old)
    registry.remove(old)
    ran: list[int] = []
    declare(Order, lambda obj, timeout: ran.append(timeout.pk), name="new_name", aliases=["old_name"])
    assert fire(row).fired == (row.pk,)
    assert ran == [row.pk]


def test_a_policy_that_is_not_declared_waits_and_fires_when_it_is_back(order: Order, declare: Declare) -> None:
    policy = declare(Order, name=f"gone_{uuid.uuid4().hex}")
    row, other = due(order, policy), due(Order.objects.create(), policy)
    registry.remove(policy)
    for _ in range(2):
        again = fire(row, other).again
        assert set(again) == {row.pk, other.pk}
        assert all(timedelta(0) < at - timezone.now() <= UNKNOWN_PAUSE for at in again.values())
    assert run(forged(row), "default").again.keys() == {row.pk}
    assert state(row) == PENDING
    dq.register_policy(policy)
    assert fire(row).fired == (row.pk,)


# What the handler does to timeouts of its object: its own row is settled by then, and its slot is free


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_handler_schedules_the_next_round_of_its_own_policy_unless_it_fails(
    order: Order, declare: Declare, fails: bool
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        dq.schedule_timeout(obj, "rounds", minutes=5, payload={"round": (timeout.payload or {})["round"] + 1})
        if fails:
            raise ValueError

    row = due(order, declare(Order, handler, name="rounds", retry=dq.Retry([60])), payload={"round": 1})
    fire(row)
    found = list(Timeout.objects.order_by("id").values_list("state", "payload"))
    next_round = ("pending", {"round": 2})
    assert found == ([("pending", {"round": 1})] if fails else [("fired", {"round": 1}), next_round])


def test_a_handler_that_cancels_or_moves_itself_learns_that_it_is_too_late(order: Order, declare: Declare) -> None:
    answers: list[Any] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        answers.append(dq.cancel_timeout(obj, "late"))
        answers.append(dq.reschedule_timeout(obj, "late", minutes=5))
        answers.append(dq.extend_timeout(obj, "late", minutes=5))

    row = due(order, declare(Order, handler, name="late"))
    fire(row)
    assert (state(row), answers) == (FIRED, [False, None, None])


def test_a_handler_that_deletes_its_object_fires(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, lambda obj, timeout: obj.delete(), name="deletes"))
    other = due(order, "remind", key="other")
    assert fire(row).fired == (row.pk,)
    assert (state(row), state(other)) == (FIRED, ("cancelled", "gone"))
    assert not Order.objects.exists()


# Statements


def statements(act: Callable[[], object]) -> list[str]:
    """Return the statements of `act`, without what MariaDB needs in order not to wait."""
    with CaptureQueriesContext(connection) as queries:
        act()
    return [each["sql"].removeprefix("SET STATEMENT innodb_lock_wait_timeout = 0 FOR ") for each in queries]


def test_a_firing_takes_one_or_three_statements_before_its_handler_and_leaves_the_history_alone(order: Order) -> None:
    row = due(order, "cancel_unpaid")
    work = work_of(row)
    Timeout.objects.filter(pk=row.pk).update(history=[{"what": "something", "at": "2026-01-01T00:00:00+00:00"}])
    words = statements(lambda: run(work, "default"))
    ours = [sql for sql in words if "testapp_effect" not in sql and not sql.startswith(("BEGIN", "COMMIT", "SET "))]
    before_handler = ours[: next(n for n, sql in enumerate(ours) if "'fired'" in sql) + 1]
    kinds = [(sql.split()[0], "testapp_order" in sql) for sql in before_handler if "id = -1" not in sql]
    at_once = can_mark_at_once(dq.get_policy(row.policy), "default")
    assert kinds == [("WITH", True)] if at_once else [("SELECT", True), ("SELECT", False), ("UPDATE", False)]
    assert not any('"history"' in sql or "`history`" in sql for sql in before_handler)
    row.refresh_from_db()
    assert len(row.history) == 1


@on_sqlite
@pytest.mark.parametrize(("mode", "count"), [("IMMEDIATE", 0), ("DEFERRED", 1)])
def test_on_sqlite_a_transaction_that_begins_as_a_reader_writes_first(
    monkeypatch: pytest.MonkeyPatch, mode: str, count: int
) -> None:
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "transaction_mode", mode)
    with transaction.atomic():
        words = statements(lambda: begin_write("default"))
    assert len([sql for sql in words if sql.startswith("UPDATE")]) == count


# Works in a row


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
    policy, taken, lines = declare(Order, act, name="in_turn"), list[Work](), list[int]()
    rows = [due(order, policy) for order in orders[:4]]
    works, _ = plan({row.pk: 1 for row in rows}, "default")

    def each() -> Iterator[Work]:
        for work in works:
            lines.append(len(logged(caplog, "timeout_fired")))
            taken.append(work)
            yield work

    def hear(**_: Any) -> None:
        """Listen."""

    with receiving(hear, *[dq.timeout_fired] * (end == "a receiver")):
        report = run_each(each(), "default")
    assert len(taken) == count
    assert sorted([*report.done, *report.again]) == sorted(work.ids[0] for work in taken)
    assert lines == [0] * count, "one after the other at the end"
    assert [state(row)[0] for row in rows[count:]] == ["pending"] * (4 - count)


# Between the plan and the firing: a lost comparison, a stop


@pytest.mark.parametrize("count", [1, 3])
def test_without_its_mark_no_handler_runs_and_no_attempt_is_counted(
    orders: list[Order], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
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


def test_one_row_of_a_group_that_is_not_due_is_enough_to_lose(orders: list[Order]) -> None:
    rows = [due(order) for order in orders]
    Timeout.objects.filter(pk=rows[3].pk).update(run_at=timezone.now() + timedelta(hours=1))
    with transaction.atomic():
        assert not marking.mark_fired(rows, timezone.now(), "default")
        transaction.set_rollback(True)
    assert {row.state for row in rows} == {"pending"}, "none is changed"


def test_a_stop_that_this_process_has_not_heard_of_is_seen_with_the_row(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("error", [ValueError, LostRace])
def test_what_handlers_have_read_is_freed_when_their_transaction_is_rolled_back(
    orders: list[Order], declare: Declare, error: type[Exception]
) -> None:
    """An open cursor of a handler would keep a read transaction of SQLite, until the garbage collector runs."""
    read: list[weakref.ref[Order]] = []

    def handler(order: Order, timeout: Any) -> None:
        read.append(weakref.ref(order))
        if len(read) == 1:
            raise error

    policy = declare(Order, handler, name="reads", together=20)
    rows = [due(order, policy) for order in orders]
    gc.disable()
    try:
        fire(*rows)
        assert read[0]() is None
    finally:
        gc.enable()
