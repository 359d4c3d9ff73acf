"""Timeouts are scheduled, moved, extended and cancelled by hand, one at a time."""

from __future__ import annotations

from datetime import timedelta

from django.db import transaction

from django_delayq import cancel_timeout, extend_timeout, reschedule_timeout, schedule_timeout
from tests.e2e.chaos.producing.operation import Operation, Undo, atomically, check_savepoint, claim, in_

KEYS = ("", "a", "b")


def _what(operation: Operation) -> tuple[str, str]:
    """Return a policy and a key that may be scheduled."""
    policy = operation.random.choice(["cancel_unpaid", "remind", "remind", "falter"])
    return policy, operation.random.choice(KEYS) if policy == "remind" else ""


@atomically
def remind(operation: Operation) -> None:
    order, key, at = operation.hands.an_order(), operation.random.choice(KEYS), in_(operation.hands.seconds())
    row = schedule_timeout(order, "remind", key=key, at=at, reason=operation.id)
    operation.note(claim("schedule", order.pk, "remind", key, deadline=at, answer=row.due_at, heard=in_(0)))


@atomically
def remind_unless_reminded(operation: Operation) -> None:
    order, key, at = operation.hands.an_order(), operation.random.choice(KEYS), in_(operation.hands.seconds())
    row = schedule_timeout(order, "remind", key=key, at=at, on_conflict="keep", reason=operation.id)
    operation.note(claim("keep", order.pk, "remind", key, deadline=at, answer=row.due_at, heard=in_(0)))


@atomically
def remind_after_a_savepoint(operation: Operation) -> None:
    """Schedule a timeout in a savepoint that rolls back, and one that must still be pushed."""
    order, at = operation.hands.an_order(), in_(operation.hands.seconds())
    try:
        with transaction.atomic():
            schedule_timeout(order, "remind", key="never", seconds=0, reason=f"half-{operation.id}")
            raise Undo
    except Undo:
        check_savepoint()
        row = schedule_timeout(order, "remind", key="b", at=at, reason=operation.id)
    operation.note(claim("schedule", order.pk, "remind", "b", deadline=at, answer=row.due_at, heard=in_(0)))


@atomically
def remind_and_change_ones_mind(operation: Operation) -> None:
    schedule_timeout(operation.hands.an_order(), "remind", seconds=0, reason=operation.id)
    raise Undo


@atomically
def falter(operation: Operation) -> None:
    order, at = operation.hands.an_order(), in_(operation.hands.seconds())
    failures = operation.random.choice([0, 1, 1, 2])
    row = schedule_timeout(order, "falter", at=at, payload={"failures": failures}, reason=operation.id)
    operation.note(claim("schedule", order.pk, "falter", deadline=at, answer=row.due_at, heard=in_(0)))


@atomically
def send_outside(operation: Operation) -> None:
    order, at = operation.hands.an_order(), in_(operation.hands.seconds())
    row = schedule_timeout(order, "send_outside", key=operation.id, at=at, reason=operation.id)
    answers = {"answer": row.due_at, "heard": in_(0)}
    operation.note(claim("schedule", order.pk, "send_outside", operation.id, deadline=at, **answers))


@atomically
def reschedule(operation: Operation) -> None:
    order, (policy, key), at = operation.hands.an_order(), _what(operation), in_(operation.hands.seconds())
    row = reschedule_timeout(order, policy, key=key, at=at)
    operation.note(claim("move", order.pk, policy, key, deadline=at, answer=row and row.due_at, heard=in_(0)))


@atomically
def extend(operation: Operation) -> None:
    order, (policy, key) = operation.hands.an_order(), _what(operation)
    seconds = operation.random.randint(1, 300) / 100
    row = extend_timeout(order, policy, key=key, after=timedelta(seconds=seconds))
    operation.note(claim("extend", order.pk, policy, key, seconds=seconds, answer=row and row.due_at))


@atomically
def cancel(operation: Operation) -> None:
    order, (policy, key) = operation.hands.an_order(), _what(operation)
    in_time = cancel_timeout(order, policy, key=key)
    operation.note(claim("cancel", order.pk, policy, key, answer=in_time))


@atomically
def cancel_and_change_ones_mind(operation: Operation) -> None:
    """Roll back a cancel, which then has no effect."""
    order, (policy, key) = operation.hands.an_order(), _what(operation)
    cancel_timeout(order, policy, key=key)
    raise Undo
