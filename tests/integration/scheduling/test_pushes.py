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
BY = "script:test"


@pytest.fixture(autouse=True)
def a_horizon_beyond_all_deadlines(settings: Settings) -> Iterator[None]:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(hours=12)}
    forget_engine()
    yield
    forget_engine()


@pytest.fixture
def order() -> Order:
    """An order that no policy arms by itself."""
    return Order.objects.create(status="new")


@pytest.fixture
def unpaid() -> Order:
    """An order with one timeout, armed by saving, due in thirty minutes."""
    return Order.objects.create(status="unpaid", created_at=timezone.now())


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


def replan(order: Order) -> None:
    operations.change_delay(UNPAID, 45 * MINUTE, by=BY, mode="recompute")


def hold_and_resume(order: Order) -> None:
    operations.hold(UNPAID, by=BY)
    operations.resume(UNPAID, by=BY)


def retry(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=5)
    dq.cancel_timeout(row)
    Timeout.objects.filter(pk=row.pk).update(state="dead", cause="retries", attempts=3)
    assert operations.retry(row, by=BY).changed == 1


def by_hand(verb: Callable[[Order], object]) -> Callable[[Order], object]:
    """After a timeout was scheduled, to be moved or replaced by `verb`."""

    def do(order: Order) -> None:
        dq.schedule_timeout(order, "remind", minutes=5)
        before = in_redis()
        verb(order)
        assert in_redis() != before

    return do


@pytest.mark.parametrize(
    "act",
    [
        lambda order: dq.schedule_timeout(order, "remind", minutes=5),
        by_hand(lambda order: dq.schedule_timeout(order, "remind", minutes=9)),
        by_hand(lambda order: dq.schedule_timeout(order, "remind", minutes=2)),
        by_hand(lambda order: dq.reschedule_timeout(order, "remind", minutes=9)),
        by_hand(lambda order: dq.reschedule_timeout(order, "remind", minutes=2)),
        by_hand(lambda order: dq.extend_timeout(order, "remind", minutes=9)),
        lambda order: dq.schedule_timeouts([order], "remind", minutes=5),
        by_hand(lambda order: dq.schedule_timeouts([order], "remind", minutes=9)),
        by_hand(lambda order: dq.reschedule_timeouts(dq.pending_timeouts(order), minutes=9)),
        by_hand(lambda order: dq.extend_timeouts(dq.pending_timeouts(order), minutes=9)),
        by_hand(lambda order: operations.postpone(dq.pending_timeouts(order), minutes=9, by=BY)),
        by_hand(lambda order: operations.fire_now(dq.pending_timeouts(order), by=BY)),
        retry,
    ],
    ids=[
        *("schedule", "replace_later", "replace_earlier", "reschedule_later", "reschedule_earlier", "extend"),
        *("schedule_many", "replace_many", "reschedule_many", "extend_many", "postpone", "fire_now", "retry"),
    ],
)
def test_what_is_scheduled_by_hand_is_in_redis_after_the_commit(order: Order, act: Callable[[Order], object]) -> None:
    act(order)
    assert in_redis() == in_ledger()
    assert len(in_ledger()) == 1


@pytest.mark.parametrize(
    "act",
    [
        lambda order: order.save(),
        lambda order: change(order, created_at=F("created_at") + 9 * MINUTE),
        lambda order: change(order, created_at=F("created_at") - 9 * MINUTE),
        lambda order: [
            Order.objects.update(created_at=F("created_at") + 9 * MINUTE),
            dq.sync_timeouts(Order.objects.all()),
        ],
        lambda order: dq.schedule_timeout(order, "cancel_unpaid", minutes=9),
        replan,
        hold_and_resume,
    ],
    ids=["save", "save_later", "save_earlier", "sync", "replace_by_hand", "change_delay", "hold_and_resume"],
)
def test_what_a_policy_arms_is_in_redis_after_the_commit(unpaid: Order, act: Callable[[Order], object]) -> None:
    assert in_redis() == in_ledger()
    act(unpaid)
    assert in_redis() == in_ledger()
    assert len(in_ledger()) == 1


@pytest.mark.parametrize("how", ["save", "sync"])
def test_what_is_armed_for_two_policies_is_in_redis_after_the_commit(
    how: str,
    declare: Callable[..., dq.TimeoutPolicy[Any]],
) -> None:
    declare(Order, name="second", after=5 * MINUTE, since="created_at", when=Q(status="unpaid"))
    if how == "save":
        Order.objects.create(status="unpaid", created_at=timezone.now())
    else:
        Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
        assert dq.sync_timeouts(Order.objects.all()) == 2
    assert in_redis() == in_ledger()
    assert len(in_ledger()) == 2


def pay_inside(order: Order) -> None:
    with dq.before_deadline(order, "cancel_unpaid"):
        pass


@pytest.mark.parametrize(
    "act",
    [
        lambda order: dq.cancel_timeout(order, "cancel_unpaid"),
        lambda order: dq.cancel_timeouts(dq.pending_timeouts(order)),
        lambda order: operations.cancel(dq.pending_timeouts(order), by=BY),
        lambda order: change(order, status="paid"),
        lambda order: [Order.objects.update(status="paid"), dq.sync_timeouts(order)],
        lambda order: order.delete(),
        pay_inside,
    ],
    ids=["cancel", "cancel_many", "operator", "save", "sync", "delete", "before_deadline"],
)
def test_what_is_cancelled_is_gone_from_redis_after_the_commit(unpaid: Order, act: Callable[[Order], object]) -> None:
    assert len(in_redis()) == 1
    act(unpaid)
    assert in_redis() == in_ledger() == {}


def test_what_lies_beyond_the_horizon_waits_in_the_ledger_alone(order: Order, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(minutes=3)}
    dq.schedule_timeout(order, "remind", minutes=4)
    assert in_redis() == {}
    dq.reschedule_timeout(order, "remind", minutes=2)
    assert in_redis() == in_ledger()
    dq.extend_timeout(order, "remind", minutes=9)
    assert in_redis() == {}


def test_cancelling_what_lies_beyond_the_horizon_does_not_call_redis(
    order: Order, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(minutes=3)}
    sent: list[Change] = []
    monkeypatch.setattr(outbox, "push", lambda using, changes: sent.extend(changes))
    for cancel in (
        dq.cancel_timeout,
        lambda order, policy: operations.cancel(dq.pending_timeouts(order, policy), by=BY),
    ):
        dq.schedule_timeout(order, "remind", minutes=4)
        cancel(order, "remind")
    assert sent == []
    row = dq.schedule_timeout(order, "remind", minutes=2)
    dq.cancel_timeout(order, "remind")
    assert [(change.id, change.due_ms is None) for change in sent] == [(row.pk, False), (row.pk, True)]


def test_what_is_due_before_the_sweep_adds_it_is_pushed_whatever_the_horizon(order: Order, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": timedelta(0), "SWEEP_INTERVAL": 5 * MINUTE}
    dq.schedule_timeout(order, "remind", minutes=9)
    assert in_redis() == in_ledger() != {}
    dq.extend_timeout(order, "remind", minutes=9)
    assert in_redis() == {}
