"""`reason=None`, as of an optional field, is stored as no reason, and never as the word None."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.policy.outcomes import Outcome
from django_delayq.testing import fire_due
from tests.integration.operations.conftest import BY, as_if, dead, pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

NONE: Any = None
REMIND, UNPAID = "testapp.order.remind", "testapp.order.cancel_unpaid"
HOUR = timedelta(hours=1)


def about(order: Order) -> Any:
    return dq.pending_timeouts(order)


def in_time(order: Order) -> None:
    with dq.before_deadline(order, "remind", reason=NONE):
        pass


CALLS: dict[str, Callable[[Order], Any]] = {
    "schedule_timeout": lambda order: dq.schedule_timeout(order, "remind", key="k", minutes=1, reason=NONE),
    "schedule_timeouts": lambda order: dq.schedule_timeouts([order], "remind", key="k", minutes=1, reason=NONE),
    "cancel_timeout": lambda order: dq.cancel_timeout(order, "remind", reason=NONE),
    "cancel_timeouts": lambda order: dq.cancel_timeouts(about(order), reason=NONE),
    "reschedule_timeout": lambda order: dq.reschedule_timeout(order, "remind", minutes=1, reason=NONE),
    "reschedule_timeouts": lambda order: dq.reschedule_timeouts(about(order), minutes=1, reason=NONE),
    "extend_timeout": lambda order: dq.extend_timeout(order, "remind", minutes=1, reason=NONE),
    "extend_timeouts": lambda order: dq.extend_timeouts(about(order), minutes=1, reason=NONE),
    "before_deadline": lambda order: in_time(order),
    "cancel": lambda order: operations.cancel(about(order), by=BY, reason=NONE),
    "cancel, firing": lambda order: operations.cancel(as_if(about(order).get(), "firing"), by=BY, reason=NONE),
    "fire_now": lambda order: operations.fire_now(about(order), by=BY, reason=NONE),
    "postpone": lambda order: operations.postpone(about(order), by=BY, reason=NONE, hours=1),
    "change_deadline": lambda order: operations.change_deadline(about(order), by=BY, reason=NONE, shift=HOUR),
    "retry": lambda order: operations.retry(dead(Order.objects.create()), by=BY, reason=NONE),
    "refire": lambda order: operations.refire(dead(Order.objects.create()), by=BY, reason=NONE),
    "erase": lambda order: operations.erase(dead(Order.objects.create()), by=BY, reason=NONE),
    "pause": lambda order: operations.pause(REMIND, by=BY, reason=NONE),
    "hold and resume": lambda order: [
        each(REMIND, by=BY, reason=NONE) for each in (operations.hold, operations.resume)
    ],
    "change_delay": lambda order: operations.change_delay(UNPAID, HOUR, by=BY, reason=NONE),
    "late": lambda order: operations.late(REMIND, after=HOUR, by=BY, reason=NONE),
    "brake": lambda order: operations.brake(REMIND, most=5, per=HOUR, by=BY, reason=NONE),
    "shadow": lambda order: operations.shadow(REMIND, share=5, by=BY, reason=NONE),
}


@pytest.mark.parametrize("call", CALLS)
def test_none_is_stored_as_no_reason(call: str, order: Order) -> None:
    pending(order)
    CALLS[call](order)
    assert "None" not in [row.reason for row in Timeout.objects.all()]
    assert not [event for row in Timeout.objects.all() for event in row.history if event.get("reason") == "None"]
    for model in (PolicyChange, PolicyControl):
        assert "None" not in model._default_manager.values_list("reason", flat=True)


def test_a_policy_that_is_retired_without_a_reason_has_none(order: Order) -> None:
    pending(order)
    Timeout.objects.update(policy="testapp.order.forgotten")
    assert operations.retire("testapp.order.forgotten", by=BY, reason=NONE).changed == 1
    assert Timeout.objects.get().reason == ""


@pytest.mark.parametrize("outcome", [dq.Skip, dq.GiveUp, dq.Snooze])
def test_an_outcome_without_a_reason_has_none_in_the_ledger_and_in_the_log(
    outcome: type[Outcome],
    order: Order,
    declare: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    delay: dict[str, Any] = {"minutes": 5} if outcome is dq.Snooze else {}

    def handler(order: Order, timeout: Timeout) -> None:
        raise outcome(reason=NONE, **delay)

    policy = declare(Order, handler)
    dq.schedule_timeout(order, policy, seconds=0)
    with caplog.at_level(logging.INFO):
        fire_due()
    row = Timeout.objects.get()
    assert row.reason == ""
    assert "None" not in str(row.history)
    assert not [record for record in caplog.records if "None" in record.getMessage()]
