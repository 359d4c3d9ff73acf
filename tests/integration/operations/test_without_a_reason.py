"""`reason=None`, as of an optional field, is stored as no reason, and never as the word None.

The contract of the operations asserts it of these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import Outcome
from django_delayq.testing import fire_due
from tests.integration.operations.conftest import pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

NONE: Any = None


def in_time(order: Order) -> None:
    with dq.before_deadline(order, "remind", reason=NONE):
        pass


CALLS: dict[str, Callable[[Order], Any]] = {
    "schedule_timeout": lambda order: dq.schedule_timeout(order, "remind", key="k", minutes=1, reason=NONE),
    "schedule_timeouts": lambda order: dq.schedule_timeouts([order], "remind", key="k", minutes=1, reason=NONE),
    "cancel_timeout": lambda order: dq.cancel_timeout(order, "remind", reason=NONE),
    "cancel_timeouts": lambda order: dq.cancel_timeouts(dq.pending_timeouts(order), reason=NONE),
    "reschedule_timeout": lambda order: dq.reschedule_timeout(order, "remind", minutes=1, reason=NONE),
    "reschedule_timeouts": lambda order: dq.reschedule_timeouts(dq.pending_timeouts(order), minutes=1, reason=NONE),
    "extend_timeout": lambda order: dq.extend_timeout(order, "remind", minutes=1, reason=NONE),
    "extend_timeouts": lambda order: dq.extend_timeouts(dq.pending_timeouts(order), minutes=1, reason=NONE),
    "before_deadline": lambda order: in_time(order),
}


@pytest.mark.parametrize("call", CALLS)
def test_none_is_stored_as_no_reason(call: str, order: Order) -> None:
    pending(order)
    CALLS[call](order)
    assert "None" not in [row.reason for row in Timeout.objects.all()]
    assert not [event for row in Timeout.objects.all() for event in row.history if event.get("reason") == "None"]


@pytest.mark.parametrize("outcome", [dq.Skip, dq.GiveUp, dq.Snooze])
def test_an_outcome_without_a_reason_has_none_in_the_ledger_and_in_the_log(
    outcome: type[Outcome], order: Order, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
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
