"""A policy whose clock a condition stops, in the kinds that the database and Python evaluate."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from tests.integration.held.times import HOUR, Declare
from tests.testapp.models import Order

TALKS = Q(note="talks")
POLICIES: dict[str, dict[str, Any]] = {
    "column": {},
    "function": {"since": lambda order: order.created_at},
    "function after": {"after": lambda order: 4 * HOUR},
    "related": {"hold_when": TALKS & (Q(customer=None) | Q(customer__name="any"))},
}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest, declare: Declare) -> dq.TimeoutPolicy[Any]:
    """A policy of four hours, with a `hold_when`."""
    options: dict[str, Any] = {"after": 4 * HOUR, "since": "created_at", "when": Q(status="unpaid"), "hold_when": TALKS}
    return declare(Order, name="talking", **options | POLICIES[request.param])
