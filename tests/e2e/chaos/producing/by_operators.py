"""Operators stop policies, let them continue, change a delay and guard rails, and repeat timeouts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import DEFAULT_DB_ALIAS

from django_delayq import InvalidDelay, operations, schedule_timeout
from django_delayq.ledger.controls import policy_state
from django_delayq.models import Timeout
from tests.e2e.chaos.audit import SHORTEST_DELAY
from tests.e2e.chaos.producing.operation import Operation, Undo, claim, in_, operation


def _label(name: str) -> str:
    return f"testapp.order.{name}"


def _change(operation: Operation, call: Callable[..., Any], policy: str, *args: Any, **options: Any) -> None:
    """Change a policy. Undo if it is like this already, or if an earlier change still moves its rows."""
    try:
        change = call(_label(policy), *args, by="chaos", **options)
    except (operations.PolicyConflict, InvalidDelay) as error:  # the end of a pause may have passed meanwhile
        raise Undo from error
    if change is None:
        raise Undo
    operation.note(claim(call.__name__, 0, policy, until=options.get("until")))


@operation(1)
def pause(operation: Operation) -> None:
    _change(operation, operations.pause, "remind", until=in_(operation.random.uniform(0.5, 2.5)))


@operation(1)
def hold(operation: Operation) -> None:
    _change(operation, operations.hold, "chill")


@operation(3)
def resume(operation: Operation) -> None:
    """What is paused, held (its deadlines move by the duration, after the commit), or paused by its brake."""
    _change(operation, operations.resume, operation.random.choice(["remind", "chill", "chill", "rush"]))


@operation(1)
def change_delay(operation: Operation) -> None:
    after = operation.random.choice([1, 2, 4]) * timedelta(seconds=SHORTEST_DELAY)
    mode = operation.random.choice(operations.policies.MODES)
    before = policy_state(_label("decay"), DEFAULT_DB_ALIAS).delay
    if mode == "keep" and before is not None and before < after:
        mode = "recompute"  # shifted back later, the kept deadlines would be earlier than the shortest delay allows
    _change(operation, operations.change_delay, "decay", after, mode=mode)


@operation(0.7)
def shadow(operation: Operation) -> None:
    _change(operation, operations.shadow, "ghost", share=operation.random.choice([0, 0, 50, 100]))


@operation(2)
def refire(operation: Operation) -> None:
    """Repeat the newest reminder that has fired, unless the next one is pending."""
    asked, own, policy = in_(0), list(map(str, operation.hands.own)), _label("remind")
    fired = Timeout.objects.filter(policy=policy, object_id__in=own, state="fired").order_by("-pk").first()
    if fired is None or not operations.refire(Timeout.objects.filter(pk=fired.pk), by="chaos").changed:
        raise Undo
    again = Timeout.objects.pending().get(policy=policy, object_id=fired.object_id, key=fired.key)
    answers = {"answer": again.due_at, "heard": in_(0)}
    operation.note(claim("refire", int(fired.object_id), "remind", fired.key, deadline=asked, **answers))


@operation(3)
def decay(operation: Operation) -> None:
    order, asked = operation.an_order(), in_(0)
    row = schedule_timeout(order, "decay", key=operation.id, reason=operation.id)
    operation.note(claim("schedule_by_policy", order.pk, "decay", operation.id, asked=asked, answer=row.due_at))
