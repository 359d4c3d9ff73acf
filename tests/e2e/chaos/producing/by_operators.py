"""Operators stop policies, let them continue, and change a delay, while everything runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django_delayq import operations, schedule_timeout
from tests.e2e.chaos.audit import SHORTEST_DELAY
from tests.e2e.chaos.producing.operation import Operation, Undo, atomically, claim, in_

PAUSED, HELD, CHANGED = (f"testapp.order.{name}" for name in ("remind", "chill", "decay"))


def _changed(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Change a policy. Undo if it is like this already, or if an earlier change still moves its rows."""
    try:
        change = call(*args, by="chaos", **options)
    except operations.PolicyConflict as error:
        raise Undo from error
    if change is None:
        raise Undo


@atomically
def pause(operation: Operation) -> None:
    until = in_(operation.random.uniform(0.5, 2.5))
    _changed(operations.pause, PAUSED, until=until)
    operation.note(claim("pause", 0, "remind", until=until))


@atomically
def resume_paused(operation: Operation) -> None:
    _changed(operations.resume, PAUSED)
    operation.note(claim("resume", 0, "remind"))


@atomically
def hold(operation: Operation) -> None:
    _changed(operations.hold, HELD)
    operation.note(claim("hold", 0, "chill"))


@atomically
def resume_held(operation: Operation) -> None:
    """The deadlines move by the duration of the hold, after the commit."""
    _changed(operations.resume, HELD)
    operation.note(claim("resume", 0, "chill"))


@atomically
def change_delay(operation: Operation) -> None:
    after = operation.random.choice([1, 2, 4]) * timedelta(seconds=SHORTEST_DELAY)
    mode = operation.random.choice(operations.policies.MODES)
    _changed(operations.change_delay, CHANGED, after, mode=mode)
    operation.note(claim("change_delay", 0, "decay"))


@atomically
def chill(operation: Operation) -> None:
    order, at = operation.hands.an_order(), in_(operation.hands.seconds())
    row = schedule_timeout(order, "chill", key=operation.id, at=at, reason=operation.id)
    answers = {"answer": row.due_at, "heard": in_(0)}
    operation.note(claim("schedule", order.pk, "chill", operation.id, deadline=at, **answers))


@atomically
def decay(operation: Operation) -> None:
    order, asked = operation.hands.an_order(), in_(0)
    row = schedule_timeout(order, "decay", key=operation.id, reason=operation.id)
    operation.note(claim("schedule_by_policy", order.pk, "decay", operation.id, asked=asked, answer=row.due_at))
