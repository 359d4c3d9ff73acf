"""Orders with rows in every state, and no memory of what an earlier test stopped."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import schedule_timeout
from django_delayq.models import Timeout
from tests.testapp.models import Order

BY = "admin:alice"


@pytest.fixture(autouse=True)
def as_in_a_new_process(controls_are_read_again: None) -> None:
    """Use the fixture for every test of this folder."""


def pending(order: Order, policy: Any = "remind", **delay: Any) -> Timeout:
    return schedule_timeout(order, policy, **(delay or {"hours": 1}))


def as_if(row: Timeout, state: str, cause: str = "", **values: Any) -> Timeout:
    """`row` as it would be in `state`."""
    settled = None if state in {"pending", "firing"} else timezone.now() - timedelta(minutes=5)
    values = {"state": state, "cause": cause, "settled_at": settled, **values}
    moved = [values[name] for name in ("run_at", "due_at") if name in values]
    if moved:  # it was scheduled before that
        values.setdefault("created_at", min([row.created_at, *moved]))
    Timeout.objects.filter(pk=row.pk).update(slot_taken=1 if state == "pending" else None, **values)
    row.refresh_from_db()
    return row


def dead(order: Order, policy: Any = "remind", **values: Any) -> Timeout:
    values = {"attempts": 3, "reason": "RuntimeError: broken", "run_at": timezone.now(), **values}
    return as_if(pending(order, policy), "dead", "retries", **values)


def said(row: Timeout) -> list[tuple[str, str, str]]:
    """Return the events in the history of `row`: what, by, reason."""
    row.refresh_from_db()
    return [(event["what"], event.get("by", ""), event.get("reason", "")) for event in row.history]
