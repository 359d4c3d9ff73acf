"""Guard rails in force: as declared, or as an operator has set them."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from django_delayq import Brake, Late, UnknownPolicy, get_policy, operations
from django_delayq.ledger.controls import PolicyState, policy_state, policy_states, stop_cache
from django_delayq.models import PolicyChange, PolicyControl
from tests.integration.operations.conftest import BY
from tests.integration.operations.names import HOUR, REMIND
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

LABEL = "testapp.order.guarded"
LATE = {"after": 3600, "then": "skip"}
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
    PolicyControl.objects.create(policy=LABEL, guards=guards, changed_at=now, stop="paused", until=now - HOUR)
    assert in_force() == expected
    (listed,) = [state for state in policy_states("default") if state.label == LABEL]
    assert in_force(listed) == expected, "also after a pause that has ended by itself"
    assert not listed.is_stopped


def test_the_actor_and_the_reason_of_a_stop_stay_while_guards_are_changed(guarded: None) -> None:
    operations.pause(LABEL, by="brake", reason="501 fired in 10 minutes")
    operations.brake(LABEL, most=1000, per=HOUR, by=BY, reason="it was a campaign")
    state = policy_state(LABEL, "default")
    assert (state.is_braked, state.by, state.reason) == (True, "brake", "501 fired in 10 minutes")
    operations.pause(LABEL, by=BY, reason="wait for Ann")
    assert not policy_state(LABEL, "default").is_braked, "an operator has paused it now"
    operations.resume(LABEL, by=BY)
    assert in_force()[1] == Brake(1000, HOUR)


@pytest.mark.parametrize("guards", [{"late": {"after": "soon"}}, {"brake": 5}, ["late"], {"shadow": None}], ids=str)
def test_wrong_values_in_the_ledger_are_logged_and_what_is_declared_is_in_force_until_they_are_set_again(
    guarded: None, guards: Any, caplog: pytest.LogCaptureFixture
) -> None:
    PolicyControl.objects.create(policy=LABEL, guards=guards, changed_at=timezone.now())
    assert in_force() == DECLARED
    assert [state.late for state in policy_states("default") if state.label == LABEL] == [DECLARED[0]]
    assert stop_cache.guards(get_policy(LABEL), "default")[:3] == DECLARED
    assert {getattr(record, "event", "") for record in caplog.records} == {"guards_wrong"}
    operations.shadow(LABEL, share=10, by=BY)
    assert in_force() == (*DECLARED[:2], 10)
    assert in_force(policy_state(REMIND, "default")) == (None, None, 0), "which declares none"


@pytest.mark.parametrize(
    ("operation", "values", "stored", "before"),
    [
        ("late", {"after": 6 * HOUR, "then": "dead"}, {"after": 21600, "then": "dead"}, LATE),
        ("brake", {"off": True}, None, {"most": 500, "per": 3600}),
        ("shadow", {"share": 0}, 0, 100),
    ],
)
def test_a_guard_is_set_and_declared_again_and_each_change_is_stored(
    guarded: None, operation: str, values: dict[str, Any], stored: Any, before: Any
) -> None:
    call = getattr(operations, operation)
    change = call(LABEL, by=BY, reason="a wrong price", **values)
    assert (change.what, change.by, change.reason) == (operation, BY, "a wrong price")
    assert change.details == {"before": before, "after": stored, "declared": False}
    assert change.finished_at is not None
    assert PolicyControl.objects.get().guards == {operation: stored, "by": {operation: BY}}
    state = policy_state(LABEL, "default")
    assert [state.set_by(guard) for guard in sorted({"late", "brake", "shadow"} - {operation})] == ["", ""]
    assert state.set_by(operation) == BY and not state.is_stopped
    assert call(LABEL, by=BY, **values) is None, "it is in force already"
    declared = call(LABEL, by="cli:bob", **({"share": None} if operation == "shadow" else {}))
    assert declared.details == {"before": stored, "after": before, "declared": True}
    assert in_force() == DECLARED
    assert policy_state(LABEL, "default").set_by(operation) == ""
    assert PolicyControl.objects.get().guards == {}
    assert list(PolicyChange.objects.order_by("id").values_list("by", flat=True)) == [BY, "cli:bob"]


@pytest.mark.parametrize(
    ("operation", "values", "words"),
    [
        ("late", {"after": HOUR, "off": True}, "either off=True or Late"),
        ("brake", {"most": 5}, "per must be a timedelta"),
        ("brake", {"per": HOUR}, "most must be an int"),
        ("shadow", {"share": True}, "percentage"),
    ],
)
def test_bad_input_says_what_is_meant(guarded: None, operation: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(operations, operation)(LABEL, by=BY, **values)
    with pytest.raises(UnknownPolicy):
        operations.shadow("testapp.order.guardet", share=1, by=BY)
    assert not PolicyControl.objects.exists() and not PolicyChange.objects.exists()
