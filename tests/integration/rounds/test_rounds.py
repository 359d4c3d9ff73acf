"""What follows from the table for an application: a round that continues keeps its payload, attempts and deadline."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import operations, testing
from django_delayq.models import Timeout
from tests.integration.rounds.stage import BY, MINUTE, NOW, Declare, at
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
ARMED: dict[str, Any] = {"after": 30 * MINUTE, "since": "created_at", "when": Q(status="unpaid")}


@pytest.fixture(autouse=True)
def noon() -> Any:
    with dq.clock.set_to(NOW):
        yield


def flap(order: Order) -> None:
    """Let a payment begin, and fail."""
    for status in ("paying", "unpaid"):
        order.status = status
        order.save()


def newest(order: Order, policy: Any) -> Timeout:
    row: Timeout = order.timeouts.filter(policy=policy.label).latest("id")
    return row


def fire(order: Order, policy: Any) -> None:
    testing.fire_due(policy, raises=False)


def fire_and_hold(order: Order, policy: Any) -> None:
    fire(order, policy)
    dq.hold_timeout(order, policy)


def fire_hold_and_resume(order: Order, policy: Any) -> None:
    fire_and_hold(order, policy)
    with dq.clock.set_to(at(1)):
        dq.resume_timeout(order, policy)


@pytest.mark.parametrize(
    ("act", "wait", "case"),
    [
        (fire, "snooze", (True, 4, 2)),
        (fire, "retry", (False, 30_000, 20_000)),
        (fire, "snooze", (False, 30_000, 20_000)),
        (fire, "retry", (True, 4, 2)),
        (fire_and_hold, "snooze", (False, 4, 2)),
        (fire_and_hold, "retry", (True, 4, 2)),
        (fire_hold_and_resume, "snooze", (True, 4, 2)),
        (fire_hold_and_resume, "retry", (False, 4, 2)),
    ],
)
def test_a_condition_that_comes_back_does_not_end_a_wait(declare: Declare, act: Any, wait: str, case: Any) -> None:
    """Not even after as many days as are too late to arm a round."""
    is_step, waited, returns = case

    def handle(*_: Any) -> None:
        raise dq.Snooze(minutes=waited) if wait == "snooze" else ValueError("the partner is down")

    found = []
    for flaps in (0, 1):
        policy = declare(Order, handle, name=f"waits_{flaps}", retry=dq.Retry([waited * 60]), **ARMED)
        if is_step:
            policy.step(-10 * MINUTE, name="remind")(handle)
        order = Order.objects.create(status="unpaid", created_at=at(-20 if is_step else -31))
        act(order, policy)
        with dq.clock.set_to(at(returns)):
            if flaps:
                flap(order)
            dq.resume_timeout(order, policy)
        row = newest(order, policy)
        found.append((row.state, row.step, row.run_at, row.attempts, row.snoozes))
    assert found[0] == found[1]


def test_what_is_to_fire_now_has_no_step_before_it_unless_that_is_taken_back(declare: Declare) -> None:
    policy = declare(Order, name="planned", grace=5 * MINUTE, **ARMED)
    policy.step(-10 * MINUTE, name="remind")(lambda order, timeout: None)
    order = Order.objects.create(status="unpaid", created_at=at(0))
    operations.fire_now(newest(order, policy), by=BY)
    operations.change_delay(policy, 60 * MINUTE, by=BY, mode="shift")
    row = newest(order, policy)
    assert (row.step, row.due_at, row.run_at) == ("", at(30), at(30))
    operations.postpone(row, by=BY, minutes=30)
    row.refresh_from_db()
    assert (row.step, row.due_at, row.run_at) == ("remind", at(60), at(50))
    Timeout.objects.update(step="", steps_over="remind", is_requested=True)  # fired now again, after its step
    operations.postpone(row, by=BY, minutes=30)
    row.refresh_from_db()
    assert (row.step, row.due_at, row.run_at) == ("", at(90), at(95)), "at the end of its grace"
    for minutes in (0, 5):
        with dq.clock.set_to(at(minutes)):
            dq.hold_timeout(order, policy, keep_deadline=True)
    assert newest(order, policy).held_at == NOW, "what is paused again is paused since the first time"
