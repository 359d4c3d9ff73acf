"""What happens to a timeout while its clock is stopped or it is paused: its time and its deadline after each event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import operations
from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.arming.sync import Synced, sync_policy
from django_delayq.models import Timeout
from django_delayq.rounds.columns import far
from django_delayq.testing import fire_due
from tests.support.hours import (
    HOUR,
    T0,
    Declare,
    again,
    at,
    hours,
    save,
    seen,
    talking,  # noqa: F401 - a fixture
    update_and_sync,
    update_and_wait,
)
from tests.support.seen import heard
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("controls_are_read_again"),
]
Act = Callable[[Order, Any], object] | dict[str, Any]
"""A call of a verb, or new values of the order."""


def by_hand(verb: str, **how: Any) -> Act:
    return lambda order, policy: getattr(dq, f"{verb}_timeout")(order, policy, **how)


def by_operator(verb: str, **how: Any) -> Act:
    return lambda order, policy: getattr(operations, verb)(dq.pending_timeouts(order, policy), by="admin:a", **how)


TALK, QUIET, PAID, UNPAID = {"note": "talks"}, {"note": ""}, {"status": "paid"}, {"status": "unpaid"}
HOLD, RESUME, PAUSE = by_hand("hold"), by_hand("resume"), by_hand("hold", keep_deadline=True)
UNTIL_10, CANCEL, AGAIN = by_hand("hold", until=T0 + 10 * HOUR), by_hand("cancel"), by_hand("schedule", hours=1)
KEEP = by_hand("schedule", hours=1, on_conflict="keep")
EXTEND, MOVE = by_hand("extend", hours=1), by_hand("reschedule", hours=7)
SHIFT, FIRE_NOW = by_operator("change_deadline", shift=-3 * HOUR), by_operator("fire_now")


def stop(order: Order, policy: Any) -> None:
    operations.hold(policy, by="admin:a")


def go(order: Order, policy: Any) -> None:
    operations.resume(policy, by="admin:a")


def fire(order: Order, policy: Any) -> None:
    fire_due(policy)


def end(order: Order, policy: Any) -> None:
    """Let a worker end the holds whose end has come."""
    end_holds_by_hand("default")


HISTORIES: dict[str, list[tuple[float, Act, str]]] = {
    "its condition stops it": [
        *((1, TALK, "held 3"), (50, fire, "held 3"), (50, {"paid_at": None}, "held 3")),
        *((50, {"note": "no more"}, "pending 53"), (54, fire, "fired")),
    ],
    "it leaves its condition and comes back": [
        *((3, TALK, "held 1"), (20, PAID, "cancelled 1"), (300, UNPAID, "held 1"), (301, PAID, "cancelled 1")),
        (302, UNPAID | QUIET, "pending 303"),
    ],
    "another start begins a new round": [
        *((3, TALK, "held 1"), (3, HOLD, "held 1"), (10, {"created_at": T0 + 10 * HOUR}, "held 4")),
        (11, {"created_at": T0 + 11 * HOUR, "note": ""}, "pending 15"),
    ],
    "a hold by hand and the condition are independent": [
        *((1, HOLD, "held 3"), (2, TALK, "held 3"), (3, QUIET, "held 3"), (4, TALK, "held 3")),
        *((4, RESUME, "held 3"), (5, UNTIL_10, "held 3"), (11, end, "held 3"), (12, QUIET, "pending 15")),
    ],
    "its deadline had passed unnoticed": [(5, TALK, "held 0"), (6, QUIET, "pending 6"), (6, fire, "fired")],
    "it is held after its deadline": [(5, HOLD, "held 0"), (8, fire, "held 0"), (8, RESUME, "pending 8")],
    "a worker ends its hold late": [(1, HOLD, "held 3"), (2, UNTIL_10, "held 3"), (9, end, "held 3"),
                                    (11, end, "pending 13")],
    "it is resumed after its end": [(1, UNTIL_10, "held 3"), (11, RESUME, "pending 13")],
    "it is held again after its end": [(1, UNTIL_10, "held 3"), (11, HOLD, "held 2")],
    "it is extended after its end": [(1, UNTIL_10, "held 3"), (11, EXTEND, "pending 14")],
    "it is moved after its end": [(1, UNTIL_10, "held 3"), (11, MOVE, "pending 18")],
    "it is moved while it is held": [(1, HOLD, "held 3"), (20, EXTEND, "held 4"), (21, MOVE, "held 7"),
                                     (30, RESUME, "pending 37")],
    "operators move it while it is held": [
        *((1, HOLD, "held 3"), (20, FIRE_NOW, "held 3"), (20, by_operator("postpone", hours=2), "held 5")),
        (20, by_operator("postpone", at=T0 + 23 * HOUR), "held 5"),  # which is no later deadline
        *((20, by_operator("postpone", at=T0 + 30 * HOUR), "held 10"), (20, SHIFT, "held 7")),
        *((20, by_operator("change_deadline", at=T0 + 21 * HOUR), "held 1"), (20, SHIFT, "held 0")),
    ],
    "it is scheduled again": [(1, HOLD, "held 3"), (5, KEEP, "held 3"), (5, AGAIN, "pending 6")],
    "it is cancelled": [(1, HOLD, "held 3"), (50, CANCEL, "cancelled 3")],
    "its policy was on hold before": [
        *((2, stop, "pending 4"), (5, HOLD, "held 2"), (6, RESUME, "pending 8"), (7, go, "pending 9")),
        *((8, HOLD, "held 1"), (8, stop, "held 1"), (9, go, "held 1"), (20, RESUME, "pending 21")),
    ],
    "a pause keeps its deadline": [(1, PAUSE, "paused 4"), (6, fire, "paused 4"), (6, RESUME, "pending 4"),
                                   (6, fire, "fired")],
    "a pause ends": [(1, by_hand("hold", until=T0 + 6 * HOUR, keep_deadline=True), "paused 4"), (7, end, "pending 4"),
                     (7, fire, "fired")],
    "it is moved while it is paused": [
        *((1, PAUSE, "paused 4"), (1, MOVE, "paused 8"), (1, SHIFT, "paused 5"), (2, FIRE_NOW, "paused 5")),
        *((2, by_operator("replan", hand_set=True), "paused 4"), (2, RESUME, "pending 4")),
    ],
    "a stopped clock replaces a pause, which has no deadline to keep": [
        (1, PAUSE, "paused 4"), (2, HOLD, "held 2"), (3, PAUSE, "held 2"), (3, RESUME, "pending 5"),
    ],
    "a condition meanwhile counts from the end of the pause": [
        (1, PAUSE, "paused 4"), (2, TALK, "paused 4"), (3, RESUME, "held 1"), (10, QUIET, "pending 11"),
    ],
    "its condition ends a pause": [(1, PAUSE, "paused 4"), (1, PAID, "cancelled 0"), (2, UNPAID, "pending 4")],
    "a hold of its policy moves its deadline": [(1, PAUSE, "paused 4"), (1, stop, "paused 4"), (3, go, "paused 6")],
}  # fmt: skip
WAYS = [
    *(("column", way) for way in (save, update_and_sync, update_and_wait)),
    *(("function", update_and_wait), ("function after", update_and_sync), ("related", save)),
]
"""Each kind of policy, and each way in which a change of the order is noticed."""


@pytest.mark.parametrize(
    ("name", "policy", "change"),
    [
        (name, *way)
        for name, history in HISTORIES.items()
        for way in (WAYS if any(isinstance(act, dict) for _, act, _ in history) else WAYS[:1])
    ],
    indirect=["policy"],
)
def test_its_time_and_its_deadline_after_each_event(policy: Any, name: str, change: Callable[..., None]) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    for hour, act, expected in HISTORIES[name]:
        with at(hour):
            if isinstance(act, dict):
                change(order, **act)
            else:
                act(order, policy)
        row = Timeout.objects.filter(policy=policy.label).latest("pk")
        assert (hour, seen(row)) == (hour, expected)


# `hold_when`: rounds with a key, calls by hand while it holds, and what is refused.


def only(policy: Any, **where: Any) -> Timeout:
    return Timeout.objects.filter(policy=policy.label, **where).latest("pk")


@pytest.mark.parametrize("change", [save, update_and_sync])
@pytest.mark.parametrize("policy", ["column", "function"], indirect=True)
def test_rounds_with_a_key_follow_the_condition_too(policy: Any, change: Any) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
        keyed = dq.schedule_timeout(order, policy, key="part", hours=9)
        by_hand = dq.schedule_timeout(order, policy, key="other", hours=9)
        dq.hold_timeout(by_hand)
    with at(1):
        change(order, note="talks")
    assert (seen(again(keyed)), seen(only(policy, key=""))) == ("held 8", "held 3")
    assert dq.schedule_timeout(order, policy, key="new", hours=1).state == "held"
    with at(2):
        change(order, note="")
    assert (seen(again(keyed)), again(by_hand).state, only(policy, key="new").state) == (
        "pending 10",
        "held",
        "pending",
    )
    with at(3):
        assert sync_policy(policy, "default") == Synced()
    Order.objects.update(note="talks")
    with at(20):
        fire_due(policy)
    assert again(keyed).state == "held"
    with at(21):
        change(order, note="")
        fire_due(policy)
    assert again(keyed).state == "fired"


@pytest.mark.parametrize("keep_deadline", [False, True])
@pytest.mark.parametrize("policy", ["column"], indirect=True)
def test_a_hold_by_hand_that_ends_while_the_condition_holds_lets_no_clock_run(policy: Any, keep_deadline: bool) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    with at(1):
        dq.hold_timeout(order, policy, keep_deadline=keep_deadline)
        save(order, note="talks")
    with at(2), heard("held", "resumed") as got:
        dq.resume_timeout(order, policy)
    row, began = only(policy), 1 + keep_deadline  # the clock of a paused one has run until then
    assert (seen(row), hours(row.held_at), row.run_at) == (f"held {4 - began}", began, far())
    assert (row.held_by_hand, [event["what"] for event in row.history][-1], got) == (False, "resumed", [])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("delay", "left"), [({}, 4), ({"hours": 7}, 7), ({"at": T0 + 5 * HOUR}, 3)])
@pytest.mark.parametrize("policy", ["column", "function after"], indirect=True)
def test_scheduling_by_hand_is_held_while_the_condition_holds(
    policy: Any, many: bool, delay: dict[str, Any], left: float
) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0, note="talks")
    assert seen(only(policy)) == "held 4"
    with at(2):
        if many:
            assert dq.schedule_timeouts([order], policy, **delay) == 1
        else:
            assert dq.schedule_timeout(order, policy, **delay).state == "held"
    assert seen(only(policy)) == f"held {left}"
    with at(3):
        save(order, note="")
    assert hours(only(policy).run_at) == 3 + left


def test_a_strict_guard_treats_a_stopped_clock_as_not_passed(policy: Any) -> None:
    with at(0):
        order = Order.objects.create(created_at=T0)
    Order.objects.update(note="talks")  # not noticed
    with at(5), dq.before_deadline(order, policy, strict=True) as row:
        assert row is not None


AUTOMATIC: dict[str, Any] = {"after": HOUR, "since": "created_at", "when": Q(status="unpaid")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**AUTOMATIC, "hold_when": "status"}, "hold_when must be a Q, not of type str"),
        ({**AUTOMATIC, "hold_when": Q()}, "would hold every timeout"),
        ({"after": HOUR, "hold_when": Q(note="talks")}, "hold_when needs when and since"),
        ({**AUTOMATIC, "hold_when": Q(nothing=1)}, "its hold_when does not fit"),
        ({**AUTOMATIC, "hold_when": Q(note__in=iter([]))}, "its hold_when is an iterator without items"),
    ],
)
def test_a_wrong_hold_when_is_refused(declare: Declare, options: dict[str, Any], words: str) -> None:
    with pytest.raises(dq.PolicyError, match=words):
        declare(Order, name="wrong", **options)
