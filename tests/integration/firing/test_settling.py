"""Each transition of a row is one compare-and-set that returns whether it won."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq.ledger import marking
from django_delayq.models import Timeout
from django_delayq.rounds.columns import settled
from tests.integration.firing.conftest import due, state
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
State, Cause = Timeout.State, Timeout.Cause
CHANGES: list[dict[str, Any]] = [
    {"run_at": timezone.now() + timedelta(hours=1)},
    {"state": "cancelled", "cause": "hand", "settled_at": timezone.now(), "slot_taken": None},
    {"state": "firing", "slot_taken": None},
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mark", ["fired", "firing"])
def test_a_row_that_changed_behind_our_back_is_not_marked(order: Order, change: dict[str, Any], mark: str) -> None:
    row = due(order)
    Timeout.objects.filter(pk=row.pk).update(**change)
    now = timezone.now()
    with transaction.atomic():
        if mark == "fired":
            assert not marking.mark_fired([row], now, "default")
        else:
            assert not marking.mark_firing(row, now + timedelta(minutes=1), "default")
    assert row.state == "pending", "and does not say so"
    assert state(row)[0] == change.get("state", "pending")


def test_one_row_of_a_group_that_is_not_due_is_enough_to_lose(orders: list[Order]) -> None:
    rows = [due(order) for order in orders]
    Timeout.objects.filter(pk=rows[3].pk).update(run_at=timezone.now() + timedelta(hours=1))
    with transaction.atomic():
        assert not marking.mark_fired(rows, timezone.now(), "default")
        transaction.set_rollback(True)
    assert {state(row)[0] for row in rows} == {"pending"}


@pytest.mark.parametrize(
    "change",
    [
        *CHANGES,
        {"attempts": 3},
        {"idempotency_key": "a" * 32},
    ],
)
def test_compare_and_set_loses_against_every_other_hand(order: Order, change: dict[str, Any]) -> None:
    row = due(order)
    Timeout.objects.filter(pk=row.pk).update(**change)
    assert not marking.compare_and_set(row, "default", reason="ours")
    assert row.reason == ""
    assert state(row)[0] == change.get("state", "pending")
    assert row.reason == ""


def test_compare_and_set_wins_when_nothing_changed_and_tells_the_row(order: Order) -> None:
    row = due(order)
    now = timezone.now()
    assert marking.compare_and_set(row, "default", **settled(State.DEAD, Cause.RETRIES, now))
    assert (row.state, row.settled_at) == ("dead", now)
    assert state(row) == ("dead", "retries")


def test_only_a_pending_row_is_skipped(order: Order) -> None:
    row = due(order)
    dq.cancel_timeout(order, "remind")
    marking.mark_settled([row], Cause.GONE, timezone.now(), "default")
    assert state(row) == ("cancelled", "hand")
