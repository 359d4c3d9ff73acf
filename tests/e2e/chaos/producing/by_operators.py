"""Operators stop policies, let them continue, change a delay and guard rails, and repeat timeouts.

The policies with guard rails are here, too: a time limit, a rate, a brake.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import DEFAULT_DB_ALIAS

from django_delayq import InvalidDelay, operations, schedule_timeout
from django_delayq.ledger.controls import policy_state
from django_delayq.models import Timeout
from tests.e2e.chaos.audit import SHORTEST_DELAY
from tests.e2e.chaos.producing.operation import Operation, Undo, atomically, claim, in_

PAUSED, HELD, CHANGED = (f"testapp.order.{name}" for name in ("remind", "chill", "decay"))


def _changed(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Change a policy. Undo if it is like this already, or if an earlier change still moves its rows."""
    try:
        change = call(*args, by="chaos", **options)
    except (operations.PolicyConflict, InvalidDelay) as error:  # the end of a pause may have passed meanwhile
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
    before = policy_state(CHANGED, DEFAULT_DB_ALIAS).delay
    if mode == "keep" and before is not None and before < after:
        mode = "recompute"  # shifted back later, the kept deadlines would be earlier than the shortest delay allows
    _changed(operations.change_delay, CHANGED, after, mode=mode)
    operation.note(claim("change_delay", 0, "decay"))


@atomically
def shadow(operation: Operation) -> None:
    share = operation.random.choice([0, 0, 50, 100])
    _changed(operations.shadow, "testapp.order.ghost", share=share)
    operation.note(claim("shadow", 0, "ghost", share=share))


@atomically
def resume_braked(operation: Operation) -> None:
    """Its brake has paused it."""
    _changed(operations.resume, "testapp.order.rush")
    operation.note(claim("resume", 0, "rush"))


@atomically
def refire(operation: Operation) -> None:
    """Repeat the newest reminder that has fired, unless the next one is pending."""
    asked, own = in_(0), map(str, operation.hands.own)
    fired = Timeout.objects.filter(policy=PAUSED, object_id__in=list(own), state="fired").order_by("-pk").first()
    if fired is None or not operations.refire(Timeout.objects.filter(pk=fired.pk), by="chaos").changed:
        raise Undo
    again = Timeout.objects.pending().get(policy=PAUSED, object_id=fired.object_id, key=fired.key)
    answers = {"answer": again.due_at, "heard": in_(0)}
    operation.note(claim("refire", int(fired.object_id), "remind", fired.key, deadline=asked, **answers))


def _schedule(operation: Operation, policy: str, **what: Any) -> None:
    order, at = operation.hands.an_order(), in_(operation.hands.seconds())
    row = schedule_timeout(order, policy, key=operation.id, at=at, reason=operation.id, **what)
    answers = {"answer": row.due_at, "heard": in_(0)}
    operation.note(claim("schedule", order.pk, policy, operation.id, deadline=at, **answers))


@atomically
def chill(operation: Operation) -> None:
    _schedule(operation, "chill")


@atomically
def ghost(operation: Operation) -> None:
    _schedule(operation, "ghost")


@atomically
def rush(operation: Operation) -> None:
    _schedule(operation, "rush")


@atomically
def overrun(operation: Operation) -> None:
    _schedule(operation, "overrun", payload={"overruns": operation.random.choice([0, 0, 0, 1])})


@atomically
def decay(operation: Operation) -> None:
    order, asked = operation.hands.an_order(), in_(0)
    row = schedule_timeout(order, "decay", key=operation.id, reason=operation.id)
    operation.note(claim("schedule_by_policy", order.pk, "decay", operation.id, asked=asked, answer=row.due_at))
