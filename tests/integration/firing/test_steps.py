"""Firing steps: once each, in order, with their own attempts, whatever happens meanwhile; and where they are shown."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.test import Client

import django_delayq as dq
from django_delayq import GiveUp, Retry
from django_delayq.models import Timeout
from django_delayq.testing import fire_due, perform
from tests.integration.firing.handlers import ATOMIC_OR_NOT, Log, raising
from tests.integration.firing.rows import hearing
from tests.support.invoices import ARMED, DAY, Declare, at, days, dunning, note, planned, ran, row_of, sent
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
ALL = ["friendly", "firm:1", "firm:2", "firm:3", "handler"]


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    return dunning(declare, retry=Retry.never())


@pytest.fixture
def order(policy: Any) -> Order:
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


def ended(order: Order) -> tuple[str, str]:
    return row_of(order).state, row_of(order).cause


@ATOMIC_OR_NOT
def test_each_step_runs_once_at_its_time_and_then_the_handler(declare: Declare, atomic: bool) -> None:
    policy = dunning(declare, atomic_steps=atomic)
    with at(0):
        order = sent()
    for day in range(20):
        with at(day):
            assert (fire_due(policy, order) == 1) is (day == 17)
        assert len(ran()) == sum(day >= runs_on for runs_on in (11, 14, 15, 16, 17))
    row = row_of(order)
    assert (ran(), [event["step"] for event in row.history]) == (ALL, ALL[:4])
    assert (row.state, row.step, row.steps_over, days(row.settled_at)) == ("fired", "", "friendly firm:3", 17)
    assert row.lateness() == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_each_step_has_its_own_idempotency_key_and_attempts(declare: Declare, is_async: bool) -> None:
    seen, keys = list[tuple[str, int]](), list[str]()

    def fail_once(_obj: Any, timeout: Timeout) -> None:
        seen.append((timeout.step, timeout.attempts))
        keys.append(timeout.idempotency_key)
        if timeout.attempts == 1:
            raise ValueError("the mail server is down")

    async def fail_later(obj: Any, timeout: Timeout) -> None:
        await sync_to_async(fail_once)(obj, timeout)

    policy = declare(Order, fail_once, name="collect", after=14 * DAY, retry=Retry([0]), **ARMED)
    policy.step(-2 * DAY, every=DAY, name="remind")(fail_later if is_async else fail_once)
    with at(0):
        order = sent()
    fire_on(policy, 12, 13, 14)
    assert seen == [(step, attempt) for step in ("remind:1", "remind:2", "") for attempt in (1, 2)]
    assert (keys[0::2] == keys[1::2], len(set(keys))) == (True, 3)
    assert row_of(order).state == "fired"


@pytest.mark.parametrize(
    ("error", "noted"),
    [(ValueError("no address"), ["failed", "failed", "step_dead"]), (GiveUp("no address"), ["step_dead"])],
)
def test_a_dead_step_is_an_error_and_what_follows_goes_on(
    declare: Declare, error: Exception, noted: list[str], caplog: Log
) -> None:
    policy = dunning(declare, retry=Retry([60]))
    policy.step(-5 * DAY, name="early")(raising(error))
    with at(0):
        order = sent()
    with hearing(dq.timeout_failed, dq.timeout_dead) as heard:
        fire_on(policy, 9, 9.5)
    row = row_of(order)
    assert planned(order) == ("friendly", 11, 14)
    assert (row.state, row.attempts, row.first_failed_at, events(order)) == ("pending", 0, None, noted)
    assert {signal for signal, _ in heard} == {dq.timeout_failed}
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (vars(line)["event"], vars(line)["step"]) == ("step_dead", "early")
    assert "early is dead, and what follows continues: " in line.getMessage()
    assert "no address" in line.getMessage()
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


def test_shadow_mode_calls_no_step_and_settles_with_the_handler(declare: Declare) -> None:
    policy = dunning(declare, shadow=True)
    with at(0):
        order = sent()
    fire_on(policy, 11, 14, 15, 16, 17)
    assert (ran(), events(order), ended(order)) == ([], ["step_shadowed"] * 4, ("skipped", "shadow"))


def test_a_step_that_is_not_declared_any_more_is_passed(policy: Any, order: Order) -> None:
    Timeout.objects.filter(pk=row_of(order).pk).update(step="gone")
    fire_on(policy, 11)
    assert (ran(), row_of(order).steps_over) == (["friendly"], "gone friendly")


def test_confirm_is_asked_before_the_handler_and_not_before_a_step(policy: dq.TimeoutPolicy[Any], order: Order) -> None:
    asked = list[float]()

    @policy.confirm()
    def ask(_obj: Any, timeout: Timeout) -> None:
        asked.append(days(timeout.run_at))

    fire_on(policy, 11, 14, 15, 16, 17)
    assert (ran(), asked) == (ALL, [17])
    assert perform(policy, Order.objects.create(status="unpaid")).state == "fired"
    assert ran() == [*ALL, "handler"]


# What a step, or another process while it runs, does to its round


def pay(obj: Order, policy: Any) -> None:
    obj.status = "paid"
    obj.save()


def pay_in_time(obj: Order, policy: Any) -> None:
    with dq.before_deadline(obj, policy):
        pay(obj, policy)


def cancel(obj: Order, policy: Any) -> None:
    assert dq.cancel_timeout(obj, policy, reason="settled in court") is True


def ends(is_atomic: bool) -> dict[Callable[..., None], tuple[str, str]]:
    by_save = ("cancelled", "condition") if is_atomic else ("skipped", "condition")
    return {
        pay: by_save,
        pay_in_time: ("cancelled", "condition" if is_atomic else "hand"),
        cancel: ("cancelled", "hand"),
    }


def during(declare: Declare, act: Callable[[Order, Any], object], atomic: bool) -> tuple[Any, Order]:
    """Fire a step that does `act` with its invoice, as another process would; return policy and invoice."""
    policy = dunning(declare)

    def early(obj: Order, timeout: Timeout) -> None:
        assert atomic or row_of(obj).state == "firing"
        note(obj, timeout)
        act(Order.objects.get(pk=obj.pk), policy)

    policy.step(-5 * DAY, atomic=atomic, name="early")(early)
    with at(0):
        order = sent()
    fire_on(policy, 9)
    return policy, order


@ATOMIC_OR_NOT
@pytest.mark.parametrize("act", [pay, pay_in_time, cancel])
def test_a_payment_or_cancel_while_a_step_runs_is_in_time(declare: Declare, act: Any, atomic: bool) -> None:
    policy, order = during(declare, act, atomic)
    fire_on(policy, 11, 14, 15, 16, 17, 40)
    assert (ran(), ended(order)) == (["early"], ends(atomic)[act])


def test_the_story_and_the_log_tell_what_became_of_steps(policy: Any, order: Order, caplog: Log) -> None:
    caplog.set_level(logging.INFO, logger="django_delayq.firing")
    with at(0):
        outlook = dq.explain_timeout(order, policy).outlook
    assert outlook.startswith("Its step friendly is due at 2030-01-12")
    assert "Its deadline is 2030-01-15" in outlook
    fire_on(policy, 15)
    with at(15):
        text = str(dq.explain_timeout(order, policy))
    assert "missed and passed: friendly, firm:1" in text
    assert "step ran: firm:2" in text
    line = caplog.records[-1]
    assert (vars(line)["event"], vars(line)["step"], vars(line)["late_seconds"]) == ("step", "firm:2", 0)
    assert "firm:2 ran 0 s late" in line.getMessage()
    fire_on(policy, 16)
    with at(16):
        assert "It acts at 2030-01-18" in dq.explain_timeout(order, policy).outlook


def test_the_admin_and_commands_show_the_next_step(policy: Any, order: Order, admin_client: Client) -> None:
    out, rows = io.StringIO(), io.StringIO()
    with at(1):
        listed = admin_client.get("/admin/django_delayq/timeout/").content.decode()
        page = admin_client.get(f"/admin/django_delayq/timeout/{row_of(order).pk}/change/").content.decode()
        call_command("delayq_list", policy=[policy.label], stdout=out)
        call_command("delayq_explain", "testapp.order", str(order.pk), policy=policy.label, stdout=out)
        call_command("delayq_list", policy=[policy.label], json=True, stdout=rows)
    assert "friendly: " in listed
    assert "friendly: " in page
    assert "Its step friendly is due at" in page
    assert "next step" in out.getvalue()
    assert "Its step friendly is due at" in out.getvalue()
    assert json.loads(rows.getvalue())[0]["step"] == "friendly"
