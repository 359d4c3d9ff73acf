"""Guard rails in force: as declared, or as an operator has set them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import Brake, Late
from django_delayq.ledger.controls import PolicyState, policy_state, policy_states
from django_delayq.models import PolicyControl
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

LABEL = "testapp.order.guarded"
HOUR = timedelta(hours=1)
DECLARED: tuple[Late, Brake, int] = (Late(HOUR), Brake(500, HOUR), 100)


@pytest.fixture
def guarded(declare: Any) -> None:
    declare(Order, name="guarded", late=DECLARED[0], brake=DECLARED[1], shadow=True)


def in_force(state: PolicyState | None = None) -> tuple[Late | None, Brake | None, int]:
    state = state or policy_state(LABEL, "default")
    return state.late, state.brake, state.shadow


@pytest.mark.parametrize(
    ("guards", "expected"),
    [
        ({}, DECLARED),
        ({"late": None, "brake": None, "shadow": 0}, (None, None, 0)),
        ({"late": {"after": 0.5, "then": "dead"}}, (Late(HOUR / 7200, "dead"), *DECLARED[1:])),
        ({"brake": {"most": 7, "per": 60}, "shadow": 10}, (DECLARED[0], Brake(7, HOUR / 60), 10)),
    ],
)
def test_what_an_operator_has_set_replaces_what_is_declared(guarded: None, guards: Any, expected: Any) -> None:
    now = timezone.now()
    control = PolicyControl.objects.create(policy=LABEL, guards=guards, changed_at=now)
    assert in_force() == expected
    control.stop, control.until = "paused", now - HOUR
    control.save()
    (listed,) = [state for state in policy_states("default") if state.label == LABEL]
    assert in_force(listed) == expected, "also after a pause that has ended by itself"
    assert not listed.is_stopped


def test_a_policy_without_guards_has_none_in_force() -> None:
    assert in_force(policy_state("testapp.order.remind", "default")) == (None, None, 0)
