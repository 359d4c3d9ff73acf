"""The verbs for many at once, the application's and the operator's, on a policy whose handler takes many at once.

Each producer has a key of its own, so that what its count should be is known: only workers compete for these.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django_delayq import (
    cancel_timeouts,
    extend_timeouts,
    pending_timeouts,
    reschedule_timeouts,
    schedule_timeouts,
)
from django_delayq.operations import cancel, fire_now, postpone
from tests.e2e.chaos.producing.operation import Operation, Undo, atomically, claim, in_
from tests.testapp.models import Order

POLICY = "gather"


def _some(operation: Operation, most: int = 15) -> list[int]:
    own = list(operation.hands.own)
    if len(own) < 2:
        raise Undo
    return operation.random.sample(own, min(len(own), operation.random.randint(2, most)))


def _pending(operation: Operation, orders: list[int]) -> Any:
    return pending_timeouts(Order.objects.filter(pk__in=orders), POLICY, key=operation.hands.name)


def _claim(operation: Operation, verb: str, orders: list[int], count: int, **what: Any) -> dict[str, Any]:
    return claim(verb, 0, POLICY, operation.hands.name, orders=orders, answer=count, **what)


@atomically
def schedule_many(operation: Operation) -> None:
    orders, at = _some(operation), in_(operation.hands.seconds())
    conflict: Any = operation.random.choice(["replace", "keep"])
    objects = list(Order.objects.filter(pk__in=orders))
    key = operation.hands.name
    count = schedule_timeouts(objects, POLICY, key=key, at=at, on_conflict=conflict, reason=operation.id)
    operation.note(_claim(operation, f"{conflict}_many", [order.pk for order in objects], count, deadline=at))


@atomically
def cancel_many(operation: Operation) -> None:
    orders = _some(operation)
    operation.note(_claim(operation, "cancel_many", orders, cancel_timeouts(_pending(operation, orders))))


@atomically
def extend_many(operation: Operation) -> None:
    orders, seconds = _some(operation), operation.random.randint(1, 200) / 100
    count = extend_timeouts(_pending(operation, orders), after=timedelta(seconds=seconds))
    operation.note(_claim(operation, "extend_many", orders, count, seconds=seconds))


@atomically
def reschedule_many(operation: Operation) -> None:
    orders, at = _some(operation), in_(operation.hands.seconds())
    count = reschedule_timeouts(_pending(operation, orders), at=at)
    operation.note(_claim(operation, "move_many", orders, count, deadline=at))


@atomically
def cancel_by_operator(operation: Operation) -> None:
    orders = _some(operation)
    steered = cancel(_pending(operation, orders), by="chaos")
    operation.note(_claim(operation, "cancel_many", orders, steered.changed))


@atomically
def postpone_by_operator(operation: Operation) -> None:
    """Those whose deadline is later already are refused."""
    orders, at = _some(operation), in_(1 + operation.hands.seconds())
    steered = postpone(_pending(operation, orders), by="chaos", at=at)
    operation.note(_claim(operation, "postpone_many", orders, steered.changed, deadline=at))


@atomically
def fire_now_by_operator(operation: Operation) -> None:
    orders, before = _some(operation, 4), in_(0)
    steered = fire_now(_pending(operation, orders), by="chaos")
    operation.note(_claim(operation, "fire_now_many", orders, steered.changed, deadline=before))
