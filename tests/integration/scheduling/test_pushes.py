"""After each commit Redis matches the ledger: it has an entry for each row that is due soon, and no other.

Without the push a timeout would still fire, but late by up to one sweep; no other test would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F, Q
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.engine.records import Change
from django_delayq.ledger import outbox
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine
from tests.support.workers import queue_in_redis
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("redis_client")]

MINUTE = timedelta(minutes=1)
UNPAID = "testapp.order.cancel_unpaid"
BY: Any = {"by": "script:test"}
Act = Callable[[Order], object]


@pytest.fixture(autouse=True)
def a_horizon_beyond_all_deadlines(settings: Settings) -> Iterator[None]:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(hours=12)}
    forget_engine()
    yield
    forget_engine()


def in_redis() -> dict[int, int]:
    """Return the milliseconds at which Redis has each row due."""
    return dict(queue_in_redis().peek())


def in_ledger() -> dict[int, int]:
    """Return the milliseconds at which the pending rows are due."""
    return {row.pk: clock.to_ms(row.run_at) for row in Timeout.objects.filter(state="pending")}


def change(order: Order, **values: object) -> None:
    for name, value in values.items():
        setattr(order, name, value)
    order.save()


def hold_and_resume(order: Order) -> None:
    operations.hold(UNPAID, **BY)
    operations.resume(UNPAID, **BY)


def retry(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=5)
    dq.cancel_timeout(row)
    Timeout.objects.filter(pk=row.pk).update(state="dead", cause="retries", attempts=3)
    assert operations.retry(row, **BY).changed == 1


def by_hand(verb: Act) -> Act:
    """After a timeout was scheduled, to be moved or replaced by `verb`."""

    def do(order: Order) -> None:
        dq.schedule_timeout(order, "remind", minutes=5)
        before = in_redis()
        verb(order)
        assert in_redis() != before

    return do


def pay_inside(order: Order) -> None:
    with dq.before_deadline(order, "cancel_unpaid"):
        pass


BY_HAND: dict[str, Act] = {
    "schedule": lambda order: dq.schedule_timeout(order, "remind", minutes=5),
    "replace by a later one": by_hand(lambda order: dq.schedule_timeout(order, "remind", minutes=9)),
    "reschedule later": by_hand(lambda order: dq.reschedule_timeout(order, "remind", minutes=9)),
    "extend": by_hand(lambda order: dq.extend_timeout(order, "remind", minutes=9)),
    "schedule many": lambda order: dq.schedule_timeouts([order], "remind", minutes=5),
    "replace many": by_hand(lambda order: dq.schedule_timeouts([order], "remind", minutes=9)),
    "reschedule many": by_hand(lambda order: dq.reschedule_timeouts(dq.pending_timeouts(order), minutes=9)),
    "extend many": by_hand(lambda order: dq.extend_timeouts(dq.pending_timeouts(order), minutes=9)),
    "postpone": by_hand(lambda order: operations.postpone(dq.pending_timeouts(order), minutes=9, **BY)),
    "fire now": by_hand(lambda order: operations.fire_now(dq.pending_timeouts(order), **BY)),
    "retry": retry,
}
ARMED: dict[str, Act] = {
    "save": lambda order: order.save(),
    "save later": lambda order: change(order, created_at=F("created_at") + 9 * MINUTE),
    "save earlier": lambda order: change(order, created_at=F("created_at") - 9 * MINUTE),
    "sync": lambda order: [Order.objects.update(created_at=F("created_at") + 9 * MINUTE), dq.sync_timeouts(order)],
    "replace by hand": lambda order: dq.schedule_timeout(order, "cancel_unpaid", minutes=9),
    "change the delay": lambda order: operations.change_delay(UNPAID, 45 * MINUTE, mode="recompute", **BY),
    "hold and resume": hold_and_resume,
}
CANCELLED: dict[str, Act] = {
    "cancel": lambda order: dq.cancel_timeout(order, "cancel_unpaid"),
    "cancel many": lambda order: dq.cancel_timeouts(dq.pending_timeouts(order)),
    "operator": lambda order: operations.cancel(dq.pending_timeouts(order), **BY),
    "save": lambda order: change(order, status="paid"),
    "sync": lambda order: [Order.objects.update(status="paid"), dq.sync_timeouts(order)],
    "delete": lambda order: order.delete(),
    "before_deadline": pay_inside,
}
CASES = [
    pytest.param(status, act, count, id=f"{status}: {name}")
    for status, acts, count in (("new", BY_HAND, 1), ("unpaid", ARMED, 1), ("unpaid", CANCELLED, 0))
    for name, act in acts.items()
]


@pytest.mark.parametrize(("status", "act", "count"), CASES)
def test_what_a_call_leaves_pending_is_in_redis_after_the_commit_and_nothing_else(
    status: str, act: Act, count: int
) -> None:
    """An unpaid order has one timeout, armed by saving, due in thirty minutes; no policy arms a new one by itself."""
    order = Order.objects.create(status=status, created_at=timezone.now())
    assert in_redis() == in_ledger()
    act(order)
    assert in_redis() == in_ledger()
    assert len(in_ledger()) == count


@pytest.mark.parametrize("how", ["save", "sync"])
def test_what_is_armed_for_two_policies_is_in_redis_after_the_commit(how: str, declare: Callable[..., Any]) -> None:
    declare(Order, name="second", after=5 * MINUTE, since="created_at", when=Q(status="unpaid"))
    if how == "save":
        Order.objects.create(status="unpaid", created_at=timezone.now())
    else:
        Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
        assert dq.sync_timeouts(Order.objects.all()) == 2
    assert in_redis() == in_ledger()
    assert len(in_ledger()) == 2


def test_what_lies_beyond_the_horizon_waits_in_the_ledger_alone_and_is_cancelled_without_a_call_of_redis(
    order: Order, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(minutes=3)}
    dq.schedule_timeout(order, "remind", minutes=4)
    assert in_redis() == {}
    dq.reschedule_timeout(order, "remind", minutes=2)
    assert in_redis() == in_ledger()
    dq.extend_timeout(order, "remind", minutes=9)
    assert in_redis() == {}
    sent: list[Change] = []
    monkeypatch.setattr(outbox, "push", lambda using, changes: sent.extend(changes))
    for cancel in (
        lambda: dq.cancel_timeout(order, "remind"),
        lambda: operations.cancel(dq.pending_timeouts(order), **BY),
    ):
        cancel()
        dq.schedule_timeout(order, "remind", minutes=4)
    assert sent == []
    dq.cancel_timeout(order, "remind")
    row = dq.schedule_timeout(order, "remind", minutes=2)
    dq.cancel_timeout(order, "remind")
    assert [(change.id, change.due_ms is None) for change in sent] == [(row.pk, False), (row.pk, True)]


def test_what_is_due_before_the_sweep_adds_it_is_pushed_whatever_the_horizon(order: Order, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(0), "SWEEP_INTERVAL": 5 * MINUTE}
    dq.schedule_timeout(order, "remind", minutes=9)
    assert in_redis() == in_ledger() != {}
    dq.extend_timeout(order, "remind", minutes=9)
    assert in_redis() == {}
