"""Timeouts are scheduled, moved, extended and cancelled by hand: one at a time, and many at once.

Many are those of a policy whose handler takes many at once. Each producer has a key of its own for them, so that what
its count should be is known: only workers compete for these.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import django_delayq as dq
from django_delayq import operations
from tests.e2e.chaos.producing.operation import Operation, Undo, claim, half, in_, operation
from tests.testapp.models import Order

KEYS = ("", "a", "b")
MANY = "gather"


def schedule(operation: Operation, policy: str, key: str = "", verb: str = "schedule", **options: Any) -> None:
    order, at = operation.an_order(), operation.a_deadline()
    row = dq.schedule_timeout(order, policy, key=key, at=at, reason=operation.id, **options)
    operation.note(claim(verb, order.pk, policy, key, deadline=at, answer=row.due_at, heard=in_(0)))


def _scheduled(operation: Operation) -> tuple[Order, str, str]:
    """Return an order, a policy and a key that may be scheduled."""
    policy = operation.random.choice(["cancel_unpaid", "remind", "remind", "falter"])
    return operation.an_order(), policy, operation.random.choice(KEYS) if policy == "remind" else ""


@operation(8)
def remind(operation: Operation) -> None:
    schedule(operation, "remind", operation.random.choice(KEYS))


@operation(3)
def remind_unless_reminded(operation: Operation) -> None:
    schedule(operation, "remind", operation.random.choice(KEYS), "keep", on_conflict="keep")


@operation(2)
def remind_after_a_savepoint(operation: Operation) -> None:
    """Schedule a timeout in a savepoint that rolls back, and one that must still be pushed."""
    never: dict[str, Any] = {"key": "never", "seconds": 0, "reason": f"half-{operation.id}"}
    half(lambda: dq.schedule_timeout(operation.an_order(), "remind", **never))
    schedule(operation, "remind", "b")


@operation(3)
def falter(operation: Operation) -> None:
    schedule(operation, "falter", payload={"failures": operation.random.choice([0, 1, 1, 2])})


@operation(10)
def schedule_one_more(operation: Operation) -> None:
    """Of the policies that act outside, or have guard rails; each has a key of its own."""
    schedule(operation, operation.random.choice(["send_outside", "chill", "ghost", "rush"]), operation.id)


@operation(2)
def overrun(operation: Operation) -> None:
    schedule(operation, "overrun", operation.id, payload={"overruns": operation.random.choice([0, 0, 0, 1])})


@operation(4)
def reschedule(operation: Operation) -> None:
    (order, policy, key), at = _scheduled(operation), operation.a_deadline()
    row = dq.reschedule_timeout(order, policy, key=key, at=at)
    operation.note(claim("move", order.pk, policy, key, deadline=at, answer=row and row.due_at, heard=in_(0)))


@operation(4)
def extend(operation: Operation) -> None:
    (order, policy, key), seconds = _scheduled(operation), operation.random.randint(1, 300) / 100
    row = dq.extend_timeout(order, policy, key=key, after=timedelta(seconds=seconds))
    operation.note(claim("extend", order.pk, policy, key, seconds=seconds, answer=row and row.due_at))


@operation(5)
def cancel(operation: Operation) -> None:
    order, policy, key = _scheduled(operation)
    operation.note(claim("cancel", order.pk, policy, key, answer=dq.cancel_timeout(order, policy, key=key)))


def _some(operation: Operation, most: int = 15) -> list[int]:
    own = list(operation.hands.own)
    if len(own) < 2:
        raise Undo
    return operation.random.sample(own, min(len(own), operation.random.randint(2, most)))


@operation(4)
def schedule_many(operation: Operation) -> None:
    objects, at = list(Order.objects.filter(pk__in=_some(operation))), operation.a_deadline()
    conflict: Any = operation.random.choice(["replace", "keep"])
    key = operation.hands.name
    count = dq.schedule_timeouts(objects, MANY, key=key, at=at, on_conflict=conflict, reason=operation.id)
    orders = [order.pk for order in objects]
    operation.note(claim(f"{conflict}_many", 0, MANY, key, orders=orders, answer=count, deadline=at))


@operation(7)
def change_many(operation: Operation) -> None:
    """By the verbs of the application, or of an operator, who may not postpone those with a later deadline."""
    verb = operation.random.choice(["cancel", "extend", "extend", "move", "move", "stop", "postpone", "fire_now"])
    orders, key = _some(operation, 4 if verb == "fire_now" else 15), operation.hands.name
    rows: Any = dq.pending_timeouts(Order.objects.filter(pk__in=orders), MANY, key=key)
    at, seconds = operation.a_deadline(), operation.random.randint(1, 200) / 100
    by: dict[str, Any] = {"by": "chaos"}
    if verb == "fire_now":
        at = in_(0)
    elif verb == "postpone":
        at += timedelta(seconds=1)
    count = {
        "cancel": lambda: dq.cancel_timeouts(rows),
        "extend": lambda: dq.extend_timeouts(rows, after=timedelta(seconds=seconds)),
        "move": lambda: dq.reschedule_timeouts(rows, at=at),
        "stop": lambda: operations.cancel(rows, **by).changed,
        "postpone": lambda: operations.postpone(rows, **by, at=at).changed,
        "fire_now": lambda: operations.fire_now(rows, **by).changed,
    }[verb]()
    verb = {"stop": "cancel"}.get(verb, verb)
    operation.note(claim(f"{verb}_many", 0, MANY, key, orders=orders, answer=count, deadline=at, seconds=seconds))
