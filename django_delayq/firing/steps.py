"""Fire a step of a policy: the row is marked as moved to what follows, then the step is called, in one transaction.

So the row of a step never counts as fired. With `atomic=False` it is `firing` while the step runs, and a second
transaction moves it. A step that is due but was missed, because a later one is due too, is noted as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django_delayq.ledger import marking
from django_delayq.ledger.planned import following, plan_of_row
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.policy.steps import MAX_STEPS, PASSED, RAN, Ended, Planned, newest_due, step_of, with_over
from django_delayq.rounds.after_attempt import AttemptFacts, Change, after_step, as_given
from django_delayq.rounds.columns import ATTEMPTS
from django_delayq.rounds.memory import with_events

if TYPE_CHECKING:
    from django_delayq.firing.members import Member


def runs_inside(policy: TimeoutPolicy[Any], row: Timeout) -> bool:
    """Return whether what is next of `row` runs in the transaction that marks it."""
    step = step_of(policy.steps, row.step)
    return policy.atomic if step is None else step.atomic


def function_of(policy: TimeoutPolicy[Any], row: Timeout) -> Callable[..., Any] | None:
    """Return the function of the step of `row`; None: the handler of the policy is next."""
    step = step_of(policy.steps, row.step)
    return None if step is None else step.handler


def following_of(policy: TimeoutPolicy[Any], row: Timeout, obj: Any) -> tuple[Planned, str]:
    """Return what follows the step of `row`, and when it may run by `within`, and what is over then."""
    then, over = following(row, policy, obj)
    return then._replace(at=policy.opening(then.at, obj)), over


def mark(member: Member, now: datetime, using: str) -> bool:
    """Mark the row of a step as moved to what follows, and keep what the step gets. Return False if it is not due."""
    given = as_given(member.row, member.row.attempts + 1)
    if not end(member, RAN, now, using):
        return False
    member.given = given
    return True


def end(member: Member, what: str, now: datetime, using: str, reason: str = "") -> bool:
    """Let the due, locked row of a step continue, whose event is `what`. Return False if it is not due after all."""
    row, policy, ended = member.row, registry.get(member.row.policy), Ended(what, member.row.step, reason)
    assert policy is not None
    then, over = following_of(policy, row, member.obj)
    return _move_on(member, after_step(row, ended, AttemptFacts(then=then, over=over)), now, using)


def pass_missed(policy: TimeoutPolicy[Any], members: Sequence[Member], now: datetime, using: str) -> list[Member]:
    """Let rows continue whose step is due, but not the newest one that is; return them, to be fired again at once.

    So an outage makes no customer get three reminders in a row. Also rows whose step is not declared any more.
    """
    moved = []
    for member in [each for each in members if each.row.step]:
        row, obj = member.row, member.obj
        missed, newest = newest_due(plan_of_row(row, policy, obj, now=now), now)
        is_declared = step_of(policy.steps, row.step) is not None
        if is_declared and not missed and (newest.name == row.step or newest.at > now):
            continue
        names = [name for name in dict.fromkeys((row.step, *missed)) if name != newest.name]
        then = newest._replace(at=policy.opening(newest.at, obj))
        facts = AttemptFacts(then=then, over=with_over(row.steps_over, names))
        change = after_step(row, Ended(PASSED, ", ".join(names[-MAX_STEPS:])), facts)
        if newest.name == row.step:  # with the attempts that it has had
            change.values.update({name: getattr(row, name) for name in ATTEMPTS})
        if _move_on(member, change, now, using):
            moved.append(member)
    return moved


def _move_on(member: Member, change: Change, now: datetime, using: str) -> bool:
    row, history = member.row, with_events(member.row, change.said, now)
    is_moved = marking.move_on(row, using, **change.values, history=history)
    if is_moved:
        member.ended = change.ended
    return is_moved
