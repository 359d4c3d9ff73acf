"""A new delay applies to timeouts that are armed from now on, and to pending ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import (
    InvalidDelay,
    clock,
    get_policy,
    pending_timeouts,
    reschedule_timeout,
    schedule_timeout,
    sync_timeouts,
)
from django_delayq.arming.sync import sync_policy
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, Timeout
from django_delayq.operations import change_delay, changes, preview_delay
from django_delayq.scheduling.bulk import schedule_timeouts
from tests.integration.operations.conftest import BY, said
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

UNPAID = "testapp.order.cancel_unpaid"
MINUTE = timedelta(minutes=1)


def unpaid(ago: timedelta = timedelta(0)) -> Order:
    return Order.objects.create(status="unpaid", created_at=timezone.now() - ago)


def waits(order: Order) -> timedelta:
    """How long after its creation the order is due."""
    assert order.created_at is not None
    return pending_timeouts(order).get().due_at - order.created_at


def test_what_is_armed_by_saving_has_the_changed_delay_at_once_and_for_no_further_query() -> None:
    unpaid()  # the first one looks up and compiles
    with CaptureQueriesContext(connection) as without:
        before = unpaid()
    change_delay(UNPAID, 45 * MINUTE, by=BY, reason="holidays")
    with CaptureQueriesContext(connection) as changed:
        after = unpaid()
    assert len(changed) == len(without)
    assert (waits(before), waits(after)) == (30 * MINUTE, 45 * MINUTE)
    change_delay(UNPAID, None, by=BY)
    assert waits(unpaid()) == 30 * MINUTE
    assert list(PolicyChange.objects.order_by("id").values_list("what", "by", "reason")) == [
        ("delay", BY, "holidays"),
        ("delay", BY, ""),
    ]


def test_every_other_way_to_arm_has_it_too() -> None:
    change_delay(UNPAID, 45 * MINUTE, by=BY)
    orders = Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now()) for _ in range(4)])
    orders = list(Order.objects.order_by("pk"))
    schedule_timeout(orders[0], "cancel_unpaid")
    schedule_timeouts(orders[1:2], "cancel_unpaid")
    sync_timeouts(orders[2])
    sync_policy(get_policy(UNPAID), "default")
    assert [waits(order) for order in orders] == [45 * MINUTE] * 4


def test_a_delay_named_by_the_caller_wins() -> None:
    change_delay(UNPAID, 45 * MINUTE, by=BY)
    order = unpaid()
    row = schedule_timeout(order, "cancel_unpaid", minutes=5)
    assert row.due_at < timezone.now() + 6 * MINUTE


def test_a_longer_delay_arms_what_the_declared_one_would_find_too_old() -> None:
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now() - 90 * MINUTE)])
    assert sync_policy(get_policy(UNPAID), "default").armed == 0
    change_delay(UNPAID, 120 * MINUTE, by=BY)
    assert sync_policy(get_policy(UNPAID), "default").armed == 1


def test_no_delay_at_all_is_a_delay_too() -> None:
    change_delay(UNPAID, timedelta(0), by=BY)
    assert waits(unpaid()) == timedelta(0)
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now())])
    assert sync_policy(get_policy(UNPAID), "default").armed == 1


def test_a_policy_whose_delay_is_computed_keeps_its_exemptions(declare: Any) -> None:
    declare(
        Order,
        name="by_note",
        since="created_at",
        when=Q(status="noted"),
        after=lambda order: None if order.note == "exempt" else MINUTE,
    )
    change_delay("testapp.order.by_note", 10 * MINUTE, by=BY)
    now = timezone.now()
    exempt = Order.objects.create(status="noted", note="exempt", created_at=now)
    other = Order.objects.create(status="noted", created_at=now)
    assert not pending_timeouts(exempt).exists()
    assert waits(other) == 10 * MINUTE


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("keep", [30 * MINUTE, 90 * MINUTE]),
        ("recompute", [45 * MINUTE, 90 * MINUTE]),
        ("shift", [45 * MINUTE, 105 * MINUTE]),
    ],
)
def test_pending_deadlines_follow_as_they_are_told(mode: Any, expected: list[timedelta]) -> None:
    plain, by_hand = unpaid(), unpaid()
    row = pending_timeouts(plain).get()
    assert by_hand.created_at is not None
    schedule_timeout(by_hand, "cancel_unpaid", at=by_hand.created_at + 90 * MINUTE)
    change = change_delay(UNPAID, 45 * MINUTE, by=BY, reason="holidays", mode=mode)
    assert [waits(plain), waits(by_hand)] == expected
    moved = {"keep": 0, "recompute": 1, "shift": 2}[mode]
    assert (change.moved, change.finished_at is not None) == (moved, True)
    assert said(row)[-1:] == ([("replanned", BY, "holidays")] if moved else [])
    Order.objects.all().update(note="saved again")
    for order in (plain, by_hand):
        order.save()
    assert [waits(plain), waits(by_hand)] == expected


def test_a_deadline_that_would_be_too_far_in_the_future_stays_and_is_counted() -> None:
    near, far = unpaid(), unpaid()
    latest = reschedule_timeout(far, "cancel_unpaid", at=datetime(2108, 6, 1, tzinfo=UTC))
    change = change_delay(UNPAID, timedelta(days=365), by=BY, mode="shift")
    assert (change.moved, change.unmoved, change.finished_at is None) == (1, 1, False)
    assert waits(near) == timedelta(days=365)
    assert latest is not None and pending_timeouts(far).get().due_at == latest.due_at


def test_a_retry_that_waits_for_longer_goes_on_waiting() -> None:
    order = unpaid()
    retry_at = timezone.now() + 300 * MINUTE
    Timeout.objects.update(run_at=retry_at, attempts=1)
    change_delay(UNPAID, 45 * MINUTE, by=BY, mode="recompute")
    row = pending_timeouts(order).get()
    assert row.run_at == retry_at
    assert waits(order) == 45 * MINUTE


def test_after_a_change_of_the_declaration_what_is_pending_can_be_planned_anew() -> None:
    order = unpaid()
    Timeout.objects.update(due_at=timezone.now(), run_at=timezone.now())
    assert change_delay(UNPAID, None, by=BY, mode="recompute").moved == 1
    assert waits(order) == 30 * MINUTE
    assert change_delay(UNPAID, None, by=BY, mode="recompute").unmoved == 1


def test_a_preview_says_how_many_would_be_due_at_once() -> None:
    unpaid(20 * MINUTE)
    unpaid(5 * MINUTE)
    seen = preview_delay(UNPAID, 10 * MINUTE)
    assert (seen.before, seen.after, seen.pending, seen.overdue) == (30 * MINUTE, 10 * MINUTE, 2, 1)
    assert preview_delay(UNPAID, 10 * MINUTE, "keep").overdue == 0
    assert preview_delay(UNPAID, 20 * MINUTE, "shift").overdue == 1
    assert not seen.is_capped
    assert not PolicyChange.objects.exists()


def test_a_preview_counts_no_further_than_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.operations.previews.MAX_COUNT", 2)
    for _ in range(3):
        unpaid()
    seen = preview_delay(UNPAID, MINUTE)
    assert (seen.pending, seen.is_capped) == (2, True)
    for row in Timeout.objects.all():
        reschedule_timeout(row, minutes=1)
    unpaid()
    seen = preview_delay(UNPAID, MINUTE)
    assert (seen.pending, seen.hand_set, seen.is_capped) == (0, 2, True), "it does not look for others beyond"
    assert preview_delay(UNPAID, MINUTE, hand_set=True).pending == 2


@pytest.mark.parametrize(
    ("label", "after", "mode", "words"),
    [
        (UNPAID, MINUTE, "kep", "mode is"),
        ("testapp.order.by_hand", -MINUTE, "keep", "negative"),
        (UNPAID, timedelta(days=999_999), "keep", "far in the future"),
        (UNPAID, timedelta(days=-999_999), "keep", "far in the past"),
        (UNPAID, 5, "keep", "timedelta"),
        ("testapp.order.remind", MINUTE, "keep", "declares no delay"),
        ("testapp.order.computed", MINUTE, "shift", "depends on the object"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    declare: Any, label: str, after: Any, mode: Any, words: str
) -> None:
    declare(Order, name="computed", after=lambda order: MINUTE, since="created_at", when=Q(status="never"))
    declare(Order, name="by_hand", after=MINUTE)
    for do in (lambda: preview_delay(label, after, mode), lambda: change_delay(label, after, by=BY, mode=mode)):
        with pytest.raises((ValueError, InvalidDelay), match=words):
            do()
    assert not PolicyChange.objects.exists()
    assert all(state.after is None for state in controls.policy_states("default"))


def test_an_object_for_which_after_raises_keeps_its_deadline_and_the_change_ends(
    declare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each worker would fail at it again, and no operator could change the policy until the code is fixed."""

    def after(order: Order) -> timedelta:
        return int(order.note or "60") * MINUTE

    policy = declare(Order, name="computed", after=after, since="created_at", when=Q(status="computed"))
    orders = [Order.objects.create(status="computed", created_at=timezone.now()) for _ in range(3)]
    Order.objects.filter(pk=orders[1].pk).update(note="oops")
    change_delay(policy, 2 * MINUTE, by=BY, mode="recompute")
    assert [waits(order) for order in orders] == [2 * MINUTE, 60 * MINUTE, 2 * MINUTE]
    change = PolicyChange.objects.get()
    assert (change.finished_at is not None, change.moved, change.unmoved) == (True, 2, 1)
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "replan_failed"]
    assert f"The first is that of object {orders[1].pk}: ValueError" in record.getMessage()


def test_a_shift_that_dies_half_way_moves_no_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    orders = [unpaid() for _ in range(5)]
    real, calls = changes._move_rows, []

    def move(*arguments: Any) -> int:
        calls.append(real(*arguments))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return calls[-1]

    with monkeypatch.context() as patched:
        patched.setattr(changes, "_move_rows", move)
        with pytest.raises(KeyboardInterrupt):
            change_delay(UNPAID, 40 * MINUTE, by=BY, mode="shift")
    assert sorted(waits(order) for order in orders) == [30 * MINUTE] * 3 + [40 * MINUTE] * 2
    change_delay(UNPAID, 50 * MINUTE, by=BY, mode="shift")
    assert {waits(order) for order in orders} == {50 * MINUTE}


def test_the_replay_of_recorded_orders_sees_the_delay_at_its_own_moment() -> None:
    moment = timezone.now() + timedelta(days=400)
    change_delay(UNPAID, 45 * MINUTE, by=BY)
    with clock.set_to(moment):
        order = Order.objects.create(status="unpaid", created_at=moment)
        assert waits(order) == 45 * MINUTE
