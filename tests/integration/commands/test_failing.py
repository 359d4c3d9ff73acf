"""Timeouts whose attempts fail are one number, on which everything agrees that an operator reads."""

from __future__ import annotations

import json

import pytest

from django_delayq.monitoring.snapshot import snapshot
from tests.integration.commands.conftest import Do
from tests.integration.operations.conftest import as_if, dead, pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

REMIND = "testapp.order.remind"


def failing(attempts: int = 1, policy: str = "remind") -> None:
    as_if(pending(Order.objects.create(), policy, minutes=30), "pending", attempts=attempts)


def test_status_and_policies_count_the_failing_timeouts(do: Do) -> None:
    failing()
    failing(4)
    pending(Order.objects.create())
    dead(Order.objects.create())
    assert snapshot().failing == (2, False)
    assert "failing   2\n" in (told := do("delayq_status").out)
    assert f"failing   {REMIND}: 2 have failed, and are tried again\n" in told
    assert json.loads(do("delayq_status", "--json").out)["failing"] == {"value": 2, "is_capped": False}
    head, *lines = do("delayq_policies").out.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{REMIND} ")]
    assert line[head.index("failing") :].split()[0] == "2"


def test_a_policy_without_failing_timeouts_has_no_line_of_its_own(do: Do) -> None:
    pending(Order.objects.create())
    assert do("delayq_status").out.count("failing") == 1
