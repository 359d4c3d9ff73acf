"""What saving and syncing make of the rounds of an order, after each event of its history."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq import clock, operations, testing
from django_delayq.arming.sync import sync_policy
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
MINUTE, DAY = timedelta(minutes=1), 24 * 60
BEGIN = timezone.now().replace(microsecond=0) - timedelta(days=30)
Act = Callable[[Order, Any], object] | dict[str, Any]
"""A call, or new values of the order."""


def at(minutes: float) -> datetime:
    return BEGIN + minutes * MINUTE


def save(order: Order, policy: Any, **values: Any) -> None:
    order.refresh_from_db()
    vars(order).update(values)
    order.save()


def update_and_sync(order: Order, policy: Any, **values: Any) -> None:
    """Change the order as SQL would, and sync it."""
    Order.objects.filter(pk=order.pk).update(**values)
    dq.sync_timeouts(order)


def update_and_wait(order: Order, policy: Any, **values: Any) -> None:
    """Change the order as SQL would, and compare the tables, as a worker does."""
    Order.objects.filter(pk=order.pk).update(**values)
    sync_policy(policy, "default")


def unnoticed(**values: Any) -> Act:
    return lambda order, policy: Order.objects.filter(pk=order.pk).update(**values)


def since(minutes: float | None) -> dict[str, Any]:
    return {"created_at": None if minutes is None else at(minutes)}


def by_hand(verb: str, **how: Any) -> Act:
    return lambda order, policy: getattr(dq, f"{verb}_timeout")(order, policy, **how)


def by_operator(verb: str, **how: Any) -> Act:
    return lambda order, policy: getattr(operations, verb)(dq.pending_timeouts(order, policy), by="admin:a", **how)


def of_policy(verb: str) -> Act:
    return lambda order, policy: getattr(operations, verb)(policy, by="admin:a")


def cancel(order: Order, policy: Any) -> None:
    assert dq.cancel_timeout(order, policy) is True


def cancel_too_late(order: Order, policy: Any) -> None:
    assert dq.cancel_timeout(order, policy) is False
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, policy):
        pytest.fail("the block ran")


def fire(order: Order, policy: Any) -> None:
    testing.fire_due(policy)


def guard(order: Order, policy: Any) -> None:
    with dq.before_deadline(order, policy):
        pass


PAYING, UNPAID, TOUCH = {"status": "paying"}, {"status": "unpaid"}, {"note": "touched"}
EXTEND = by_hand("extend", minutes=60)
LATER: dict[str, tuple[Act, str]] = {
    "extended": (EXTEND, "pending 90 x1"),
    "rescheduled": (by_hand("reschedule", minutes=65), "pending 90"),
    "postponed": (by_operator("postpone", minutes=60), "pending 90"),
}
HISTORIES: dict[str, list[tuple[float, Act, str]]] = {
    "its condition ends and holds again": [(1, PAYING, "ended"), (2, UNPAID, "ended, pending 30")],
    "its start moves": [
        *((1, since(60), "pending 90"), (2, by_hand("schedule", hours=5), "pending 302")),
        *((3, {"note": "changed"}, "pending 302"), (4, since(None), "ended"), (5, since(60), "ended, pending 302")),
    ],
    "its start moves back beyond CATCH_UP": [(1, since(-3 * DAY), f"pending {30 - 3 * DAY}"),
                                             (2, since(-6 * DAY), "cancelled late")],
    **{
        f"it is {name} before a payment that fails": [
            *((25, act, moved), (26, PAYING, "ended"), (26, UNPAID, f"ended, {moved}"), (27, PAYING, "ended, ended")),
            *((27, UNPAID, f"ended, ended, {moved}"), (80, fire, f"ended, ended, {moved}")),
        ]
        for name, (act, moved) in LATER.items()
    },
    "its policy is on hold before a payment that fails": [
        *((25, of_policy("hold"), "pending 30"), (85, of_policy("resume"), "pending 90")),
        *((86, PAYING, "ended"), (86, UNPAID, "ended, pending 90")),
    ],
    "a new start keeps nothing": [(1, EXTEND, "pending 90 x1"), (2, PAYING, "ended"),
                                  (3, UNPAID | since(1), "ended, pending 31")],
    "a request to fire now is not kept": [
        *((1, EXTEND, "pending 90 x1"), (2, by_operator("fire_now"), "pending 2 x1")),
        *((3, PAYING, "ended"), (4, UNPAID, "ended, pending 30 x1")),
    ],
    "an extended round counts from the deadline that it had": [
        *((1, by_hand("extend", days=30), f"pending {30 + 30 * DAY} x1"), (20 * DAY, PAYING, "ended")),
        (20 * DAY, UNPAID, f"ended, pending {30 + 30 * DAY} x1"),
    ],
    "its condition holds again after its deadline": [
        *((25, unnoticed(status="paying"), "pending 30"), (31, fire, "skipped condition")),
        *((40, UNPAID, "skipped condition, pending 30"), (40, fire, "skipped condition, fired")),
    ],
    "its condition holds again within CATCH_UP": [(25, PAYING, "ended"), (4 * DAY, UNPAID, "ended, pending 30")],
    "its condition holds again after CATCH_UP": [(25, PAYING, "ended"), (6 * DAY, UNPAID, "ended")],
    "a cancelled round stays closed": [
        *((1, PAYING, "ended"), (2, UNPAID, "ended, pending 30"), (3, cancel, "ended, cancelled hand")),
        *((4, PAYING, "ended, cancelled hand"), (40, UNPAID, "ended, cancelled hand")),
    ],
    "a round that is cancelled before it is armed is not armed": [
        *((1, PAYING, "ended"), (2, since(5), "ended"), (3, unnoticed(status="unpaid"), "ended")),
        *((4, cancel, "ended, cancelled hand"), (5, TOUCH, "ended, cancelled hand")),
    ],
    "a round that is cancelled while its condition does not hold is not armed again": [
        *((1, PAYING, "ended"), (2, cancel, "ended, cancelled hand"), (3, UNPAID, "ended, cancelled hand")),
        *((4, since(40), "ended, cancelled hand, pending 70"), (5, PAYING, "ended, cancelled hand, ended")),
    ],
    "the present round is cancelled although that of a former start is pending": [
        *((1, unnoticed(**since(31)), "pending 30"), (2, cancel, "cancelled hand, cancelled hand")),
        (3, TOUCH, "cancelled hand, cancelled hand"),
    ],
    "a guard leaves a round that is not armed yet to its condition": [
        *((1, PAYING, "ended"), (2, unnoticed(status="unpaid", **since(2)), "ended"), (3, guard, "ended")),
        (4, TOUCH, "ended, pending 32"),
    ],
    "a fired round does not count as a later one that is not armed yet": [
        *((30, fire, "fired"), (31, unnoticed(**since(31)), "fired"), (32, guard, "fired")),
        *((33, cancel, "fired, cancelled hand"), (34, TOUCH, "fired, cancelled hand")),
    ],
    "a round that has fired before the newest one is too late too": [
        *((30, fire, "fired"), (31, since(31), "fired, pending 61"), (61, fire, "fired, fired")),
        *((62, unnoticed(**since(0)), "fired, fired"), (63, cancel_too_late, "fired, fired")),
    ],
    "a fired round is too late, also after a newer one that was superseded": [
        *((30, fire, "fired"), (31, cancel_too_late, "fired"), (32, since(31), "fired, pending 61")),
        *((33, since(0), "fired, cancelled superseded"), (34, cancel_too_late, "fired, cancelled superseded")),
        (35, since(34), "fired, cancelled superseded, pending 64"),
    ],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "columns": {},
    "since": {"since": lambda order: order.created_at},
    "after": {"after": lambda order: 30 * MINUTE},
}
WAYS = [
    *(("columns", way) for way in (save, update_and_sync, update_and_wait)),
    *(("since", save), ("since", update_and_wait), ("after", update_and_sync)),
]
"""Each kind of policy, and each way in which a change of the order is noticed."""


def seen(order: Order, policy: Any) -> str:
    """Return the rounds: their deadlines in minutes, and extensions; "ended": by the condition."""
    found = []
    for row in order.timeouts.filter(policy=policy.label).order_by("id"):
        word = row.state if row.state == "fired" else f"{row.state} {row.cause}"
        word = f"pending {(row.due_at - BEGIN) / MINUTE:g}" if row.state == "pending" else word
        extended = f" x{row.extensions}" if row.extensions else ""
        found.append("ended" if word == "cancelled condition" else word + extended)
    return ", ".join(found)


@pytest.mark.parametrize(("kind", "change"), WAYS)
@pytest.mark.parametrize("name", HISTORIES)
def test_the_rounds_of_an_order_after_each_event(
    declare: Callable[..., Any], settings: Settings, name: str, kind: str, change: Callable[..., None]
) -> None:
    hours, days = timedelta(hours=2), timedelta(days=5)  # so that no deadline is too old for a sync only
    settings.DELAYQ = {**settings.DELAYQ, "SYNC_INTERVAL": hours, "CATCH_UP": days}
    options: dict[str, Any] = {"since": "created_at", "after": 30 * MINUTE, "when": Q(status="unpaid")}
    policy = declare(Order, name="pays", **options | KINDS[kind])
    with clock.set_to(BEGIN):
        order = Order.objects.create(created_at=BEGIN)
    for minutes, act, expected in HISTORIES[name]:
        with clock.set_to(at(minutes)):
            if isinstance(act, dict):
                change(order, policy, **act)
            else:
                act(order, policy)
        assert (minutes, seen(order, policy)) == (minutes, expected)
