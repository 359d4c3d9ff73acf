"""Firing steps: once each, in order, with their own attempts, and with the guarantees of a firing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import Fired, GiveUp, Late, Retry, Skip, Snooze, WorkingHours
from django_delayq.models import Timeout
from django_delayq.testing import fire_due, perform
from tests.integration.firing.conftest import raising
from tests.integration.steps.days import ARMED, DAY, Declare, at, days, dunning, note, planned, ran, row_of, sent
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
ALL = ["friendly", "firm:1", "firm:2", "firm:3", "handler"]


@pytest.fixture(params=[True, False], ids=["atomic", "outside"])
def policy(declare: Declare, request: pytest.FixtureRequest) -> dq.TimeoutPolicy[Any]:
    return dunning(declare, atomic_steps=request.param, retry=Retry([3600]))


@pytest.fixture
def invoice(policy: Any) -> Order:
    """An invoice that was sent on day 0, for which its steps are planned."""
    with at(0):
        return sent()


def fire_on(policy: Any, *on: float) -> None:
    """Fire the due timeouts on these days."""
    for day in on:
        with at(day):
            fire_due(policy, raises=False)


def events(order: Order) -> list[str]:
    return [event["what"] for event in row_of(order).history]


def test_each_step_runs_once_at_its_time_and_then_the_handler(policy: Any, invoice: Order) -> None:
    for day in range(30):
        with at(day):
            fired = fire_due(policy, invoice)
            assert (fired == 1) is (day == 17)
            assert len(ran()) == sum(day >= runs_on for runs_on in (11, 14, 15, 16, 17))
    assert ran() == ALL
    row = row_of(invoice)
    assert (row.state, row.step, row.steps_over, days(row.settled_at)) == ("fired", "", "friendly firm:3", 17)
    assert events(invoice) == ["step", "step", "step", "step"]
    assert [event["step"] for event in row.history] == ALL[:4]
    assert row.lateness() == 0


def test_each_step_has_its_own_idempotency_key_and_attempts(declare: Declare) -> None:
    seen = list[tuple[str, int]]()
    keys = list[str]()

    def fail_once(_obj: Any, timeout: Timeout) -> None:
        seen.append((timeout.step, timeout.attempts))
        keys.append(timeout.idempotency_key)
        if timeout.attempts == 1:
            raise ValueError("the mail server is down")

    policy = declare(Order, fail_once, name="collect", after=14 * DAY, retry=Retry([0]), **ARMED)
    policy.step(-2 * DAY, every=DAY, name="remind")(fail_once)
    with at(0):
        order = sent()
    fire_on(policy, 12, 13, 14)
    assert seen == [(step, attempt) for step in ("remind:1", "remind:2", "") for attempt in (1, 2)]
    assert keys[0::2] == keys[1::2]
    assert len(set(keys)) == 3
    assert row_of(order).state == "fired"


def test_a_paid_invoice_gets_no_further_step(policy: Any, invoice: Order) -> None:
    fire_on(policy, 11)
    Order.objects.update(status="paid")  # which no signal sees
    with at(14):
        assert len(fire_due(policy, invoice).skipped) == 1
    assert ran() == ["friendly"]
    assert (row_of(invoice).state, row_of(invoice).cause) == ("skipped", "condition")


@pytest.mark.parametrize(
    ("error", "noted"),
    [(ValueError("no address"), ["failed", "failed", "step_dead"]), (GiveUp("no address"), ["step_dead"])],
)
def test_a_dead_step_is_noted_and_what_follows_goes_on(declare: Declare, error: Exception, noted: list[str]) -> None:
    policy = dunning(declare, retry=Retry([60]))
    policy.step(-5 * DAY, name="early")(raising(error))
    with at(0):
        order = sent()
    with at(9):
        found = fire_due(policy, order, raises=False)
    assert (found.dead, len(found.failed)) == ([], 1)
    fire_on(policy, 9.5)
    row = row_of(order)
    assert planned(order) == ("friendly", 11, 14)
    assert (row.state, row.attempts, row.first_failed_at, events(order)) == ("pending", 0, None, noted)
    assert "no address" in row.history[-1]["reason"]
    fire_on(policy, 11)
    assert ran() == ["friendly"]


def test_a_retry_of_a_step_does_not_delay_what_follows(declare: Declare) -> None:
    policy = dunning(declare, retry=Retry([10 * DAY, 10 * DAY]))
    policy.step(-5 * DAY, name="early")(raising(ValueError("down")))
    with at(0):
        order = sent()
    fire_on(policy, 9)
    assert planned(order) == ("early", 11, 14)
    fire_on(policy, 11)
    assert (ran(), events(order)) == (["friendly"], ["failed", "steps_passed", "step"])


OUTCOMES: dict[str, Callable[[], Any]] = {
    "Skip": lambda: Skip("no address"),
    "Snooze": lambda: Snooze(hours=12),
    "Fired": lambda: Fired("sent by fax"),
    "GiveUp": lambda: GiveUp("no address"),
}


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
@pytest.mark.parametrize(
    ("outcome", "how"),
    [(name, how) for name in OUTCOMES for how in ("raised", "returned") if (name, how) != ("Fired", "raised")],
)
def test_a_step_decides_about_itself_alone(declare: Declare, outcome: str, how: str, atomic: bool) -> None:
    calls = list[tuple[str, int]]()

    def decide(obj: Any, timeout: Timeout) -> Any:
        calls.append((timeout.idempotency_key, timeout.attempts))
        note(obj, timeout)
        if len(calls) > 1:
            return None
        if how == "raised":
            raise OUTCOMES[outcome]()
        return OUTCOMES[outcome]()

    policy = dunning(declare)
    policy.step(-5 * DAY, atomic=atomic, name="early")(decide)
    with at(0):
        order = sent()
    with at(9):
        fire_due(policy, order)
    row = row_of(order)
    is_kept = how == "returned" or not atomic
    assert ran() == (["early"] if is_kept else [])
    expected = {"Skip": "step_skipped", "Snooze": "snoozed", "Fired": "step", "GiveUp": "step_dead"}[outcome]
    assert row.history[-1]["what"] == expected
    assert row.state == "pending"
    if outcome == "Snooze":
        assert (planned(order), row.snoozes, row.attempts) == (("early", 9.5, 14), 1, 0)
        with at(9.5):
            fire_due(policy, order)
        assert [attempts for _, attempts in calls] == [1, 1]
        assert len({key for key, _ in calls}) == 1
    else:
        assert row.history[-1]["reason"] == ("sent by fax" if outcome == "Fired" else "no address")
    assert planned(order) == ("friendly", 11, 14)
    assert row_of(order).snoozes == 0


def test_a_step_may_cancel_or_extend_its_own_round(declare: Declare) -> None:
    policy = declare(Order, note, name="collect", after=14 * DAY, **ARMED)

    @policy.step(-3 * DAY)
    def decide(obj: Order, timeout: Timeout) -> None:
        assert (timeout.step, timeout.is_waiting) == ("decide", True)
        if obj.note == "cancel":
            assert dq.cancel_timeout(obj, policy, reason="settled in court")
        else:
            assert dq.extend_timeout(obj, policy, days=7)

    with at(0):
        cancelled, extended = sent(), sent()
        Order.objects.filter(pk=cancelled.pk).update(note="cancel")
    with at(11):
        fire_due(policy)
    assert (row_of(cancelled).state, row_of(cancelled).cause) == ("cancelled", "hand")
    assert planned(extended) == ("", 21, 21)
    with at(21):
        assert fire_due(policy) == 1
    assert ran() == ["handler"]


def test_what_is_too_late_is_passed_if_it_is_a_step(declare: Declare) -> None:
    policy = dunning(declare, late=Late(timedelta(hours=2), then="dead"))
    with at(0):
        order = sent()
    with at(11.5):
        fire_due(policy, order)
    assert (ran(), events(order)) == ([], ["step_late"])
    assert planned(order) == ("firm:1", 14, 14)
    with at(17.5):
        assert len(fire_due(policy, order).dead) == 1
    assert (row_of(order).state, row_of(order).cause) == ("dead", "late")


def test_shadow_mode_calls_no_step_and_settles_with_the_handler(declare: Declare) -> None:
    policy = dunning(declare, shadow=True)
    with at(0):
        order = sent()
    fire_on(policy, 11, 14, 15, 16, 17)
    assert ran() == []
    assert events(order) == ["step_shadowed"] * 4
    assert (row_of(order).state, row_of(order).cause) == ("skipped", "shadow")


def test_quiet_hours_delay_a_step_and_only_the_newest_runs_in_the_morning(declare: Declare) -> None:
    office = WorkingHours("UTC", {"mon-sun": ("08:00-18:00",)})
    policy = declare(Order, note, name="collect", after=14 * DAY, within=office, **ARMED)
    policy.step(timedelta(hours=-14), name="evening")(note)  # 22:00
    policy.step(timedelta(hours=-6), name="night")(note)  # 06:00
    with at(0):
        order = sent()
        assert planned(order) == ("evening", round(13 + 20 / 24, 6), 14)  # 08:00
    with at(13.5):
        assert not fire_due(policy, order)
    with at(13 + 21 / 24):
        fire_due(policy, order)
    assert ran() == ["night"]


def test_a_step_that_is_not_declared_any_more_is_passed(policy: Any, invoice: Order) -> None:
    Timeout.objects.filter(pk=row_of(invoice).pk).update(step="gone")
    fire_on(policy, 11)
    assert ran() == ["friendly"]
    assert row_of(invoice).steps_over == "gone friendly"


def test_perform_calls_the_handler_at_once(policy: Any) -> None:
    order = Order.objects.create(status="unpaid")
    row = perform(policy, order)
    assert row.state == "fired"
    assert ran() == ["handler"]


def test_confirm_is_asked_before_the_handler_and_not_before_a_step(declare: Declare) -> None:
    policy, asked = dunning(declare), list[float]()

    @policy.confirm()
    def ask(_obj: Any, timeout: Timeout) -> None:
        asked.append(days(timeout.run_at))

    with at(0):
        sent()
    fire_on(policy, 11, 14, 15, 16, 17)
    assert ran() == ALL
    assert asked == [17]


def test_with_hold_when_no_step_runs_while_it_holds(declare: Declare) -> None:
    policy = dunning(declare, hold_when=Q(note="in talks"))
    with at(0):
        order = sent()
    Order.objects.update(note="in talks")
    fire_on(policy, 11)
    assert (row_of(order).state, ran()) == ("held", [])
    with at(12):
        order.note = ""
        order.save()
        assert planned(order) == ("friendly", 12, 15)
        fire_due(policy, order)
    assert ran() == ["friendly"]
