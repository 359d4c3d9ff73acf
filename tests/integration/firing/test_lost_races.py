"""What changes between the plan and the firing decides: a lost comparison, a stop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.firing import plan, run
from django_delayq.firing.judge import LostRace
from django_delayq.ledger import marking
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, state
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]


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
    assert not Effect.objects.exists()
    assert {(*state(row), row.attempts) for row in rows} == {("pending", "", 0)}
    fire(*rows)
    assert {state(row)[0] for row in rows} == {"fired"}


def test_a_stop_that_this_process_has_not_heard_of_is_seen_with_the_row(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache may omit a new stop for up to a second; the locking statement reads it."""
    row = due(order)
    works, _ = plan({row.pk: 1}, "default")
    with monkeypatch.context() as patched:
        patched.setattr(type(stop_cache), "forget", lambda self: None)
        operations.pause("testapp.order.remind", by="script:test")
        report = run(works[0], "default")
    stop_cache.forget()
    assert set(report.again) == {row.pk}
    assert state(row) == ("pending", "")
    assert not Effect.objects.exists()


def test_the_timeouts_of_a_stopped_policy_are_not_planned(order: Order) -> None:
    row = due(order)
    operations.pause("testapp.order.remind", by="script:test")
    works, report = plan({row.pk: 1}, "default")
    assert works == []
    assert report.now is not None
    assert report.again[row.pk] > report.now


def test_what_is_due_within_the_time_ahead_is_planned(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", seconds=30)
    assert plan({row.pk: 1}, "default")[0] == []
    works, report = plan({row.pk: 1}, "default", timedelta(minutes=1))
    assert [work.ids for work in works] == [(row.pk,)]
    assert report.early == {row.pk: row.run_at}


def test_planned_ahead_only_what_is_due_at_nearly_the_same_time_shares_a_work(
    orders: list[Order], declare: Declare
) -> None:
    policy = declare(Order, name="shared", together=20)
    at = timezone.now() + timedelta(seconds=30)
    millisecond = timedelta(milliseconds=1)
    rows = [
        dq.schedule_timeout(order, policy, at=at + n * millisecond)
        for n, order in zip((0, 1, 3, 9), orders, strict=False)
    ]
    now = due(orders[4], policy)
    ids = [row.pk for row in rows]
    works, report = plan({row.pk: 1 for row in [*rows, now]}, "default", timedelta(minutes=1))
    assert sorted(work.ids for work in works) == sorted([(now.pk,), (ids[0], ids[1]), (ids[2],), (ids[3],)])
    assert report.early == {row.pk: row.run_at for row in rows}


def test_the_next_batch_after_one_that_failed_is_a_batch_again(orders: list[Order], declare: Declare) -> None:
    calls: list[int] = []

    def handler(queryset: Any, timeouts: list[Timeout]) -> None:
        calls.append(len(timeouts))
        if len(calls) == 1:
            raise ValueError("the first batch fails")

    policy = declare(Order, handler, name="fails_once", batch=10)
    fire(*[due(order, policy) for order in orders[:2]])
    assert calls == [2, 1, 1]
    fire(*[due(order, policy) for order in orders[2:]])
    assert calls == [2, 1, 1, 3]


@pytest.mark.parametrize("error", [ValueError, LostRace])
def test_what_handlers_have_read_is_freed_when_their_transaction_is_rolled_back(
    orders: list[Order], declare: Declare, error: type[Exception]
) -> None:
    """An open cursor of a handler would keep a read transaction of SQLite, until the garbage collector runs."""
    read: list[weakref.ref[Order]] = []

    def handler(order: Order, timeout: Timeout) -> None:
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
